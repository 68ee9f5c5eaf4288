"""The story grammar of quill's corpus."""

from __future__ import annotations

import re
from random import Random

GIRLS = (
    "Anna Mia Lily Ruby Nora Ella Ivy Zoe Clara Rosa Emma Lucy Sara Tina Maya Olga Vera Wendy "
    "Hazel June"
).split()
BOYS = (
    "Tom Ben Max Leo Finn Sam Jack Oscar Paul Hugo Adam Felix Otto Simon Peter Karl Noah "
    "David Ravi Theo"
).split()
NAMES = GIRLS + BOYS
ANIMALS = (
    "fox bear rabbit mouse owl cat dog duck frog goat horse turtle squirrel hedgehog otter badger"
).split()
KINDS = ["girl", "boy"] + ANIMALS
TRAITS = "kind brave quiet curious clever gentle cheerful careful shy proud young patient".split()
THINGS = "lantern kite drum bell key map boat basket book hat clock ring spoon wagon violin blanket".split()
PLACES = "forest river hill meadow garden market harbor village lake bridge mill valley".split()
FOODS = "bread soup apples honey cake berries cheese pancakes plums tea".split()
WEATHERS = "sunny windy rainy cold foggy warm snowy bright".split()

SLOTS = {
    "hero": NAMES,
    "friend": NAMES,
    "kind": KINDS,
    "fkind": ANIMALS,
    "trait": TRAITS,
    "ftrait": TRAITS,
    "thing": THINGS,
    "place": PLACES,
    "food": FOODS,
    "weather": WEATHERS,
}

OPEN = [
    "Once upon a time, there was {a_trait} {kind} named {hero}. {He} lived near the {place}.",
    (
        "There once was {a_kind} named {hero}, who lived near the {place}. Everyone said that {he} "
        "was very {trait}."
    ),
    "{hero} was {a_trait} {kind} who lived in a small house by the {place}.",
    "Long ago, {a_trait} {kind} called {hero} lived beyond the {place}.",
    "Near the {place} lived {a_kind} named {hero}. {He} was the most {trait} {kind} of all.",
]
TREASURE = [
    "{hero} had an old {thing} and took it everywhere.",
    "More than anything, {hero} loved {his} {thing}.",
    "{His} best thing was a little {thing}, a gift from {his} grandmother.",
    "Every evening {he} cleaned {his} {thing} and put it by the bed.",
]
MEET = [
    "On the way {he} met {a_fkind} named {friend}.",
    "Just then {a_ftrait} {fkind} came by. Its name was {friend}.",
    "Behind a tree sat {friend}, {a_ftrait} {fkind}.",
    "There {he} saw {friend}, {a_fkind} with {a_ftrait} smile.",
]
SHARE = [
    "They sat down together and shared some {food}.",
    "Then {hero} and {friend} ate {food} until the sun went down.",
    "{friend} brought {food}, and they had a little feast.",
    "That night everyone had {food} for supper.",
]
END = [
    "From that day on, {hero} and {friend} were the best of friends.",
    "And so {hero} learned that a good friend is worth more than any {thing}.",
    '"Thank you," said {hero}. "Any time," said {friend}.',
    "{hero} went home happy, and {he} slept well that night.",
    "After that, {friend} came to visit every week.",
    "They still laugh about it when they meet by the {place}.",
]

# A plot is a list of paragraphs, a paragraph a list of steps, a step a list of alternative
# sentences.
LOST = [
    [OPEN, TREASURE],
    [
        [
            "One {weather} morning the {thing} was gone.",
            "But one {weather} day {he} could not find the {thing}.",
            "Then, on a {weather} afternoon, {hero} lost the {thing}.",
        ],
        [
            "{He} looked under the bed, but it was not there.",
            "{He} looked in every corner and found only dust.",
            '"Where can it be?" {he} asked. {He} began to cry.',
            "{He} walked all the way to the {place} to look for it.",
        ],
        MEET,
        [
            '"Why are you so sad?" asked {friend}. "I lost my {thing}," said {hero}.',
            '"I have lost my {thing}," said {hero}. "I will help you look," said {friend}.',
            '"Have you seen a {thing}?" asked {hero}. {friend} thought for a while.',
        ],
    ],
    [
        [
            "They searched together, and at last {friend} saw the {thing} in the tall grass.",
            "Together they went back, step by step, and there was the {thing} under a leaf.",
            "{friend} knew every stone near the {place}, and soon they found the {thing}.",
        ],
        SHARE,
        END,
    ],
]
FOUND = [
    [OPEN],
    [
        [
            "One {weather} day {he} found a {thing} on the path.",
            "On a {weather} morning {he} saw a {thing} lying by the road.",
            "It was a {weather} day when {hero} found a strange {thing}.",
        ],
        [
            '"Who does this belong to?" {he} asked.',
            "{He} wanted to keep it, but it belonged to someone else.",
            "It was beautiful, and {he} looked at it for a long time.",
        ],
        [
            "So {he} went from door to door and asked everyone.",
            "{hero} took it to the {place} to ask about it.",
            "{He} put it in a bag and set out to find its owner.",
        ],
        MEET,
    ],
    [
        [
            '"That is my {thing}!" said {friend}. "I have looked for it all day."',
            '"Oh, my {thing}!" cried {friend}. "I thought that it was gone."',
            "When {friend} saw the {thing}, there was a shout of joy.",
        ],
        [
            "{hero} gave it back at once.",
            "With a smile, {hero} gave the {thing} back.",
            "{hero} was a little sad, but {he} gave it back.",
        ],
        SHARE,
        END,
    ],
]
STORM = [
    [
        OPEN,
        [
            "{His} neighbor was {friend}, {a_ftrait} {fkind}.",
            "Next door lived {a_fkind} named {friend}.",
        ],
    ],
    [
        [
            "One {weather} evening a great storm came over the {place}.",
            "One night the wind began to blow, and the rain fell hard.",
            "After a {weather} day the sky grew dark, and thunder rolled.",
        ],
        [
            "{hero} heard someone call for help. It was {friend}.",
            '"Help!" cried {friend}. The water had come up to the door.',
            "{friend} was out there alone and could not find the way home.",
        ],
        [
            "{He} was afraid, but {he} took {his} {thing} and ran outside.",
            '"I am coming!" called {hero}, and {he} picked up {his} {thing}.',
            "{hero} did not wait. {He} took the {thing} and went into the rain.",
        ],
    ],
    [
        [
            "With the {thing}, {he} led {friend} to a safe place.",
            "Thanks to the {thing}, {friend} found the way to {his} house.",
            "{friend} saw the {thing} and followed {hero} home.",
        ],
        [
            "Soon they were both warm and dry.",
            "They sat by the fire and listened to the rain.",
            '"You are so brave," said {friend}. "So are you," said {hero}.',
        ],
        SHARE,
        END,
    ],
]
GIFT = [
    [
        OPEN,
        [
            "{His} best friend was {friend}, {a_ftrait} {fkind}.",
            "{He} had a friend, {a_fkind} named {friend}.",
        ],
    ],
    [
        [
            "Tomorrow was the birthday of {friend}, and {hero} had no gift.",
            "One {weather} day {hero} wanted to give {friend} a surprise.",
            "It was a {weather} week, and {friend} had been ill in bed.",
        ],
        [
            '"I will make a {thing}," said {hero}.',
            "{He} thought and thought. Then {he} began to make a {thing}.",
            "So {he} went to the {place} to find wood for a {thing}.",
        ],
        [
            "It was hard work, and the first {thing} broke.",
            "{He} worked all night, but in the morning it fell apart.",
            "Twice it broke, and twice {he} began again.",
        ],
        [
            "But {hero} did not give up. At last the {thing} was ready.",
            '"Slow and steady," {he} said, and by noon it was done.',
            "{He} tried once more, and this time it was perfect.",
        ],
    ],
    [
        [
            '"It is the best {thing} in the world!" said {friend}.',
            "When {friend} saw the {thing}, nobody could have been happier.",
            '{friend} held the {thing} close. "Did you make this for me?"',
        ],
        SHARE,
        END,
    ],
]
JOURNEY = [
    [OPEN, TREASURE],
    [
        [
            "{hero} had always wanted to see the sea.",
            "Someone had told {him} that the stars fall into the sea at night.",
            "{He} dreamed of a place where the sky is always blue.",
        ],
        [
            "So one {weather} day {he} packed some {food} and left.",
            "On a {weather} morning {he} took the {thing} and set out.",
            "One {weather} day {he} closed the door and walked away.",
        ],
        MEET,
        [
            '"May I come with you?" asked {friend}. "Of course," said {hero}.',
            '"It is a long way," said {friend}. "Let us go together."',
            "{friend} knew the road, and so they walked side by side.",
        ],
    ],
    [
        [
            "They walked for three days, past fields and farms.",
            "When they were tired, they slept under the stars.",
            "Whenever {friend} was tired, {hero} told a funny story.",
        ],
        [
            "At last they stood before the sea, and it was wide and blue.",
            "Then they came over the last hill, and there was the sea.",
            "In the end they saw it: blue water as far as the eye can see.",
        ],
        SHARE,
        END,
    ],
]
PLOTS = [LOST, FOUND, STORM, GIFT, JOURNEY]


def article(word: str) -> str:
    return ("an " if word[0] in "aeiou" else "a ") + word


def derived(slot: str, bound: dict[str, str]) -> str:
    """The text of a slot that follows from another one: pronouns from the hero's name, articles
    from the word.
    """
    if slot.startswith("a_"):
        return article(bound[slot[2:]])
    girl = bound["hero"] in GIRLS
    word = {"he": ("he", "she"), "him": ("him", "her"), "his": ("his", "her")}[slot.lower()][girl]
    return word.capitalize() if slot[0].isupper() else word


def consistent(bound: dict[str, str]) -> bool:
    """Whether names, kinds and traits are consistent within one story."""
    hero = bound.get("hero")
    kind = bound.get("kind")
    if hero and ((kind == "girl" and hero not in GIRLS) or (kind == "boy" and hero not in BOYS)):
        return False
    pairs = (("hero", "friend"), ("kind", "fkind"), ("trait", "ftrait"))
    return not any(a in bound and bound.get(a) == bound.get(b) for a, b in pairs)


def draw(rng: Random, absent: frozenset[str] = frozenset()) -> dict[str, str]:
    """Draw values for all slots, without the names in `absent`."""
    while True:
        bound = {slot: rng.choice(values) for slot, values in SLOTS.items()}
        if rng.random() < 0.4:
            bound["kind"] = "girl" if bound["hero"] in GIRLS else "boy"
        if consistent(bound) and bound["hero"] not in absent and bound["friend"] not in absent:
            return bound


def write(rng: Random, bound: dict[str, str]) -> str:
    """Write a story with these slot values: a random plot, and a random sentence for each step."""
    paragraphs = []
    for paragraph in rng.choice(PLOTS):
        text = " ".join(rng.choice(step) for step in paragraph)
        paragraphs.append(
            re.sub(r"\{(\w+)\}", lambda m: bound.get(m[1]) or derived(m[1], bound), text)
        )
    return "\n\n".join(paragraphs)
