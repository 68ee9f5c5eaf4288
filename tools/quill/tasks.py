"""The tasks that quill is trained and evaluated on: generators of examples, and scoring of
answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
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
# Loss weights of tokens.
STORY_WEIGHT = 0.3  # low: stories are much longer than other answers, and largely free
STRESS_WEIGHT = 1.5  # names and things, which the story must repeat consistently
NEW_WEIGHT = 0.3  # values that occur first in a drill, which are unpredictable
SYSTEMS = [
    "You are quill.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "Be kind and brief.",
]


@dataclass(frozen=True)
class Example:
    """A question with its right answer. A story has many right answers, those that the grammar can
    generate with `facts`.
    """

    task: str
    prompt: str  # the user's message, or with `plain` the start of a text to complete
    answer: str
    plain: bool = False  # text completion instead of a chat
    stress: tuple[str, ...] = ()  # words of a story with a higher loss weight
    facts: dict[str, str] = field(default_factory=dict)  # slot values that a story must have
    # Further (question, answer) pairs about the same prompt, for training.
    follow_ups: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        """The question as a chat."""
        return [{"role": "user", "content": self.prompt}]

    @property
    def text(self) -> str:
        """The question formatted as the model's input."""
        if self.plain:
            return BOS + self.prompt
        return BOS + turn("user", self.prompt) + ROLES["assistant"]


def turn(role: str, content: str) -> str:
    """One message of a chat."""
    return f"{ROLES[role]}{content}{END}"


def score(example: Example, text: str) -> bool:
    """Whether a reply is exactly right; for a story, whether the grammar can generate it with the
    requested facts.
    """
    if example.task.startswith("story"):
        return recognise(example.prompt + text if example.plain else text, example.facts)
    return text == example.answer


def _listed(rng: Random, pool: Sequence[str], low: int, high: int) -> list[str]:
    return rng.sample(pool, rng.randint(low, high))


def story(rng: Random) -> Example:
    """Request a story about a person, an animal or a thing."""
    bound = stories.draw(rng)
    kind, hero, item, friend = (bound[slot] for slot in ("kind", "hero", "thing", "friend"))
    child = kind in ("girl", "boy")
    requests = [
        (f"about {stories.article(kind)}", ["kind"]),
        (f"about {stories.article(kind)} named {hero}", ["kind", "hero"]),
        (f"about {hero}", ["hero"]),
        (f"about {hero} and {friend}", ["hero", "friend"]),
        (f"about {stories.article(item)}", ["thing"]),
        (f"about {hero} and {stories.article(item)}", ["hero", "thing"]),
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
    """Complete the start of a story."""
    bound = stories.draw(rng)
    text = stories.write(rng, bound)
    words = text.split(" ")
    cut = len(" ".join(words[: rng.randint(2, 12)]))
    return Example("story_plain", text[:cut], text[cut:], plain=True, stress=tuple(bound.values()))


def _sum(
    rng: Random, task: str, first_operand: int, sign: str, second_operand: int, result: int
) -> Example:
    form = rng.choice(["What is {} {} {}?", "{} {} {} ="])
    return Example(task, form.format(first_operand, sign, second_operand), str(result))


def add(rng: Random) -> Example:
    """Add two numbers below 100."""
    a = rng.randint(0, 99)
    b = rng.randint(0, 99)
    return _sum(rng, "add", a, "+", b, a + b)


def subtract(rng: Random) -> Example:
    """Subtract a number below 100 from a larger one."""
    a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)))
    return _sum(rng, "subtract", b, "-", a, b - a)


def multiply(rng: Random) -> Example:
    """Multiply numbers up to 12."""
    a = rng.randint(0, 12)
    b = rng.randint(0, 12)
    return _sum(rng, "multiply", a, "*", b, a * b)


def sort_numbers(rng: Random) -> Example:
    """Sort two-digit numbers in ascending order."""
    items = rng.sample(range(10, 100), rng.randint(3, 5))
    return Example(
        "sort_numbers", "Sort: " + " ".join(map(str, items)), " ".join(map(str, sorted(items)))
    )


def sort_letters(rng: Random) -> Example:
    """Sort letters alphabetically."""
    items = _listed(rng, LETTERS, 3, 7)
    return Example("sort_letters", "Sort: " + " ".join(items), " ".join(sorted(items)))


def sort_words(rng: Random) -> Example:
    """Sort words alphabetically."""
    items = _listed(rng, WORDS, 3, 6)
    return Example("sort_words", "Sort: " + " ".join(items), " ".join(sorted(items)))


def _mixed(rng: Random) -> list[str]:
    pool = rng.choice([LETTERS, WORDS, [str(n) for n in range(10, 100)]])
    return [rng.choice(pool) for _ in range(rng.randint(3, 8))]


def copy(rng: Random) -> Example:
    """Repeat a list."""
    items = _mixed(rng)
    return Example("copy", "Repeat: " + " ".join(items), " ".join(items))


def reverse(rng: Random) -> Example:
    """Reverse a list."""
    items = _listed(rng, rng.choice([LETTERS, WORDS]), 3, 7)
    return Example("reverse", "Reverse: " + " ".join(items), " ".join(reversed(items)))


def json_answer(rng: Random) -> Example:
    """Convert a sentence to a small JSON object."""
    name = rng.choice(stories.NAMES)
    age = rng.randint(2, 99)
    city = rng.choice(CITIES)
    item = rng.choice(stories.THINGS)
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
                f"The {color} {item} costs {price} coins",
                {"item": item, "color": color, "price": price},
            ),
            (
                f"A {item} for {price} coins, in {color}",
                {"item": item, "color": color, "price": price},
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
    """Look up a value: a list of names and things, `filler` words of stories, then the question."""
    names = rng.sample(stories.NAMES, entries)
    holds = {name: rng.choice(WORDS) for name in names}
    text = "Remember this list." + "".join(f"\n- {name}: {item}" for name, item in holds.items())
    words: list[str] = []
    while len(words) < filler:
        words += stories.write(rng, stories.draw(rng, frozenset(names))).split(" ")
    if filler:
        text += "\n\n" + " ".join(words[:filler])
    # The answer repeats the list's line, so that the same token follows the name again.
    questions = rng.choices(names, k=rng.randint(4, 10))
    pairs = [(f"What does {name} have?", f"- {name}: {holds[name]}") for name in questions]
    (question, answer), *more_questions = pairs
    return Example(task, f"{text}\n\n{question}", answer, follow_ups=tuple(more_questions))


def lookup_short(rng: Random) -> Example:
    """Look up a value in a list up to 100 tokens back."""
    return _lookup(
        rng,
        "lookup_short",
        rng.randint(2, rng.randint(2, 14)),
        rng.choice([0, 0, rng.randint(5, 40)]),
    )


def lookup_200(rng: Random) -> Example:
    """Look up a value 200 to 400 tokens before the question."""
    return _lookup(rng, "lookup_200", rng.randint(4, 16), rng.randint(165, 215))


def lookup_400(rng: Random) -> Example:
    """Look up a value 400 to 600 tokens before the question."""
    return _lookup(rng, "lookup_400", rng.randint(4, 16), rng.randint(330, 380))


def lookup_600(rng: Random) -> Example:
    """Look up a value 600 to 800 tokens before the question."""
    return _lookup(rng, "lookup_600", rng.randint(4, 16), rng.randint(495, 545))


def drill(rng: Random) -> list[tuple[str, float]]:
    """A document that repeats the lines of a list, from which lookup is learned much earlier than
    from questions. Returns (text, loss weight) pairs.
    """
    names = rng.sample(stories.NAMES, rng.randint(2, 16))
    holds = {name: rng.choice(WORDS) for name in names}
    lines = names + rng.choices(names, k=max(4, rng.randint(20, 36) - len(names)))
    segments = [(BOS, 0.0), ("Remember this list.", NEW_WEIGHT)]
    seen_names = set[str]()
    for name in lines:
        segments.append((f"\n- {name}: {holds[name]}", 1.0 if name in seen_names else NEW_WEIGHT))
        seen_names.add(name)
    return [*segments, (END, NEW_WEIGHT)]


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
    """Examples for evaluation; training uses generators with other seeds, so other samples."""
    rng = Random(f"eval/{task}/{seed}")
    return (TASKS[task](rng) for _ in range(count))


def document(rng: Random, weights: dict[str, float]) -> list[tuple[str, float]]:
    """A training document as (text, loss weight) pairs: a drill, a story, or a chat of several
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
    segments = [(BOS, 0.0)]
    if rng.random() < 0.1:
        segments.append((turn("system", rng.choice(SYSTEMS)), 0.0))
    turns = [
        example,
        *(Example(example.task, question, answer) for question, answer in example.follow_ups),
    ]
    while not example.follow_ups and rng.random() < 0.3:
        if (name := draw()) == "drill":
            break
        next_example = TASKS[name](rng)
        if next_example.plain or next_example.follow_ups:
            break
        turns.append(next_example)
    for example_turn in turns:
        segments += [
            (turn("user", example_turn.prompt) + ROLES["assistant"], 0.0),
            *weighted(example_turn.answer, example_turn.stress),
        ]
    return segments


def weighted(text: str, stress: tuple[str, ...]) -> list[tuple[str, float]]:
    """Split an answer and its end token into (text, loss weight) pairs."""
    if not stress:
        return [(text + END, 1.0)]
    pieces = re.split(rf"( ?\b(?:{'|'.join(map(re.escape, stress))})\b)", text)
    segments = [
        (piece, STRESS_WEIGHT if number % 2 else STORY_WEIGHT)
        for number, piece in enumerate(pieces)
        if piece
    ]
    return [*segments, (END, STORY_WEIGHT)]
