"""The tasks that quill learns and is tested on: each draws examples from a seeded generator and
scores answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

from . import stories as stories
from .recogniser import recognise

BOS = "<|bos|>"
END = "<|end|>"
PAD = "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
SPECIALS = [PAD, BOS, END, *ROLES.values()]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role not in ['system', 'user', "
    "'assistant'] %}{{ raise_exception('quill knows the roles system, user and assistant, not ' ~ "
    "message.role) }}{% endif %}{{ '<|' ~ message.role ~ '|>' ~ message.content ~ '<|end|>' }}{% "
    "endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()
WORDS = (
    "apple bird cloud door egg fish gold house ice jar key lamp moon nest oak pen queen road snow "
    "tree wheel yard ant box cup dust ear farm glass hand ink king leaf milk nut oil pig rope "
    "salt tent"
).split()
COLORS = "red blue green black white yellow pink gray".split()
CITIES = (
    "Rome Paris Oslo Cairo Lima Tokyo Delhi Bern Riga Quito Accra Lagos Dublin Madrid Vienna Berlin"
).split()
JOBS = "baker pilot nurse farmer teacher painter sailor singer".split()
STORY_WEIGHT = 0.3  # a story has a hundred tokens where a sum has three, and most of them are free
STRESS_WEIGHT = 1.5  # names and things, which the rest of the story must repeat
NEW_WEIGHT = 0.3  # what a drill says for the first time cannot be predicted
SYSTEMS = [
    "You are quill.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be kind and brief.",
]


@dataclass(frozen=True)
class Example:
    """A question with its one right answer; a story has many, and `facts` and the grammar decide
    which.
    """

    task: str
    prompt: str  # the user's message, or for `plain` the head of a text to complete
    answer: str
    plain: bool = False
    stress: tuple[str, ...] = ()  # the words of a story that others follow from
    facts: dict[str, str] = field(default_factory=dict)
    # further questions about the same prompt, for training
    follow_ups: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The question as a chat."""
        return [{"role": "user", "content": self.prompt}]

    @property
    def text(self) -> str:
        """The question as the model reads it."""
        if self.plain:
            return BOS + self.prompt
        return BOS + turn("user", self.prompt) + ROLES["assistant"]


def turn(role: str, content: str) -> str:
    """One message of a chat."""
    return f"{ROLES[role]}{content}{END}"


def score(example: Example, text: str) -> bool:
    """Whether a reply is exactly right; of a story, whether the grammar could have written it as
    asked.
    """
    if example.task.startswith("story"):
        return recognise(example.prompt + text if example.plain else text, example.facts)
    return text == example.answer


def _listed(rng: Random, pool: list[str], low: int, high: int) -> list[str]:
    return rng.sample(pool, rng.randint(low, high))


def story(rng: Random) -> Example:
    """A story about somebody or something."""
    bound = stories.draw(rng)
    kind, hero, thing, friend = (bound[slot] for slot in ("kind", "hero", "thing", "friend"))
    child = kind in ("girl", "boy")
    requests = [
        (f"about {stories.article(kind)}", ["kind"]),
        (f"about {stories.article(kind)} named {hero}", ["kind", "hero"]),
        (f"about {hero}", ["hero"]),
        (f"about {hero} and {friend}", ["hero", "friend"]),
        (f"about {stories.article(thing)}", ["thing"]),
        (f"about {hero} and {stories.article(thing)}", ["hero", "thing"]),
    ]
    about, slots = rng.choice(requests[1:] if child else requests)
    ask = rng.choice(
        ["Write a story", "Tell me a story", "Write a short story", "Please tell me a story"]
    )
    facts = {slot: bound[slot] for slot in slots}
    return Example(
        "story",
        f"{ask} {about}.",
        stories.write(rng, bound),
        stress=tuple(bound.values()),
        facts=facts,
    )


def story_plain(rng: Random) -> Example:
    """The head of a story to go on with."""
    bound = stories.draw(rng)
    text = stories.write(rng, bound)
    words = text.split(" ")
    cut = len(" ".join(words[: rng.randint(2, 12)]))
    return Example("story_plain", text[:cut], text[cut:], plain=True, stress=tuple(bound.values()))


def _sum(rng: Random, task: str, left: int, sign: str, right: int, result: int) -> Example:
    form = rng.choice(["What is {} {} {}?", "{} {} {} ="])
    return Example(task, form.format(left, sign, right), str(result))


def add(rng: Random) -> Example:
    """Two numbers below a hundred."""
    a = rng.randint(0, 99)
    b = rng.randint(0, 99)
    return _sum(rng, "add", a, "+", b, a + b)


def subtract(rng: Random) -> Example:
    """A number below a hundred less a smaller one."""
    a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    return _sum(rng, "subtract", b, "-", a, b - a)


def multiply(rng: Random) -> Example:
    """The tables up to twelve."""
    a = rng.randint(0, 12)
    b = rng.randint(0, 12)
    return _sum(rng, "multiply", a, "*", b, a * b)


def sort_numbers(rng: Random) -> Example:
    """Two-digit numbers, smallest first."""
    items = rng.sample(range(10, 100), rng.randint(3, 5))
    return Example(
        "sort_numbers", "Sort: " + " ".join(map(str, items)), " ".join(map(str, sorted(items)))
    )


def sort_letters(rng: Random) -> Example:
    """Letters in the order of the alphabet."""
    items = _listed(rng, LETTERS, 3, 7)
    return Example("sort_letters", "Sort: " + " ".join(items), " ".join(sorted(items)))


def sort_words(rng: Random) -> Example:
    """Words in the order of the dictionary."""
    items = _listed(rng, WORDS, 3, 6)
    return Example("sort_words", "Sort: " + " ".join(items), " ".join(sorted(items)))


def _mixed(rng: Random) -> list[str]:
    pool = rng.choice([LETTERS, WORDS, [str(n) for n in range(10, 100)]])
    return [rng.choice(pool) for _ in range(rng.randint(3, 8))]


def copy(rng: Random) -> Example:
    """A list once more."""
    items = _mixed(rng)
    return Example("copy", "Repeat: " + " ".join(items), " ".join(items))


def reverse(rng: Random) -> Example:
    """A list from its end to its beginning."""
    items = _listed(rng, rng.choice([LETTERS, WORDS]), 3, 7)
    return Example("reverse", "Reverse: " + " ".join(items), " ".join(reversed(items)))


def json_answer(rng: Random) -> Example:
    """A sentence as a small JSON object."""
    name = rng.choice(stories.NAMES)
    age = rng.randint(2, 99)
    city = rng.choice(CITIES)
    thing = rng.choice(stories.THINGS)
    color = rng.choice(COLORS)
    price = rng.randint(2, 99)
    job = rng.choice(JOBS)
    animal = rng.choice(stories.ANIMALS)
    sentence, value = rng.choice(
        [
            (f"{name} is {age} and lives in {city}", {"name": name, "age": age, "city": city}),
            (
                f"{name} lives in {city} and is {age} years old",
                {"name": name, "age": age, "city": city},
            ),
            (
                f"The {color} {thing} costs {price} coins",
                {"item": thing, "color": color, "price": price},
            ),
            (
                f"A {thing} for {price} coins, in {color}",
                {"item": thing, "color": color, "price": price},
            ),
            (f"{name} is a {job} in {city}", {"name": name, "job": job, "city": city}),
            (
                f"{name} has a {color} {animal}",
                {"name": name, "pet": {"kind": animal, "color": color}},
            ),
        ]
    )
    return Example("json", f"Give JSON for: {sentence}", json.dumps(value))


def _lookup(rng: Random, task: str, entries: int, filler: int) -> Example:
    """Who has what, then a stretch of stories of `filler` words, then the question."""
    names = rng.sample(stories.NAMES, entries)
    holds = {name: rng.choice(WORDS) for name in names}
    text = "Remember this list." + "".join(f"\n- {name}: {what}" for name, what in holds.items())
    words: list[str] = []
    while len(words) < filler:
        words += stories.write(rng, stories.draw(rng, frozenset(names))).split(" ")
    if filler:
        text += "\n\n" + " ".join(words[:filler])
    # The answer is the line of the list: what followed the name once follows it again.
    asked = rng.choices(names, k=rng.randint(4, 10))
    pairs = [(f"What does {name} have?", f"- {name}: {holds[name]}") for name in asked]
    (question, answer), *rest = pairs
    return Example(task, f"{text}\n\n{question}", answer, follow_ups=tuple(rest))


def lookup_short(rng: Random) -> Example:
    """The list is up to a hundred tokens back."""
    return _lookup(
        rng,
        "lookup_short",
        rng.randint(2, rng.randint(2, 14)),
        rng.choice([0, 0, rng.randint(5, 40)]),
    )


def lookup_200(rng: Random) -> Example:
    """The answer stands 200 to 400 tokens before the question."""
    return _lookup(rng, "lookup_200", rng.randint(4, 16), rng.randint(165, 215))


def lookup_400(rng: Random) -> Example:
    """The answer stands 400 to 600 tokens before the question."""
    return _lookup(rng, "lookup_400", rng.randint(4, 16), rng.randint(330, 380))


def lookup_600(rng: Random) -> Example:
    """The answer stands 600 to 800 tokens before the question."""
    return _lookup(rng, "lookup_600", rng.randint(4, 16), rng.randint(495, 545))


def drill(rng: Random) -> list[tuple[str, float]]:
    """A list whose lines come again and again: looking up is learned from it long before it is from
    questions.
    """
    names = rng.sample(stories.NAMES, rng.randint(2, 16))
    holds = {name: rng.choice(WORDS) for name in names}
    lines = names + rng.choices(names, k=max(4, rng.randint(20, 36) - len(names)))
    parts = [(BOS, 0.0), ("Remember this list.", NEW_WEIGHT)]
    said = set[str]()
    for name in lines:
        parts.append((f"\n- {name}: {holds[name]}", 1.0 if name in said else NEW_WEIGHT))
        said.add(name)
    return [*parts, (END, NEW_WEIGHT)]


TASKS: dict[str, Callable[[Random], Example]] = {
    "story": story,
    "story_plain": story_plain,
    "add": add,
    "subtract": subtract,
    "multiply": multiply,
    "sort_numbers": sort_numbers,
    "sort_letters": sort_letters,
    "sort_words": sort_words,
    "copy": copy,
    "reverse": reverse,
    "json": json_answer,
    "lookup_short": lookup_short,
    "lookup_200": lookup_200,
    "lookup_400": lookup_400,
    "lookup_600": lookup_600,
}


def fresh(task: str, count: int, seed: int = 0) -> Iterator[Example]:
    """Examples for judging; training draws from generators with other names, so from other
    samples.
    """
    rng = Random(f"eval/{task}/{seed}")
    return (TASKS[task](rng) for _ in range(count))


def document(rng: Random, weights: dict[str, float]) -> list[tuple[str, float]]:
    """One training document as (text, weight in the loss): a story, or a chat of one or more
    turns.
    """

    def draw() -> str:
        return rng.choices(list(weights), list(weights.values()))[0]

    first = draw()
    if first == "drill":
        return drill(rng)
    example = TASKS[first](rng)
    if example.plain:
        return [(BOS, 0.0), *weighted(example.prompt + example.answer, example.stress)]
    parts = [(BOS, 0.0)]
    if rng.random() < 0.1:
        parts.append((turn("system", rng.choice(SYSTEMS)), 0.0))
    turns = [
        example,
        *(Example(example.task, question, answer) for question, answer in example.follow_ups),
    ]
    while not example.follow_ups and rng.random() < 0.3:
        if (name := draw()) == "drill":
            break
        again = TASKS[name](rng)
        if again.plain or again.follow_ups:
            break
        turns.append(again)
    for one in turns:
        parts += [
            (turn("user", one.prompt) + ROLES["assistant"], 0.0),
            *weighted(one.answer, one.stress),
        ]
    return parts


def weighted(text: str, stress: tuple[str, ...]) -> list[tuple[str, float]]:
    """An answer and its end, in parts with the weight of each."""
    if not stress:
        return [(text + END, 1.0)]
    pieces = re.split(rf"( ?\b(?:{'|'.join(map(re.escape, stress))})\b)", text)
    parts = [
        (piece, STRESS_WEIGHT if number % 2 else STORY_WEIGHT)
        for number, piece in enumerate(pieces)
        if piece
    ]
    return [*parts, (END, STORY_WEIGHT)]
