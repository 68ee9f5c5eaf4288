"""Semantic search: rank texts by the cosine similarity of their embeddings to a question's.

Prints the texts for each question in order of similarity. Embedding models such as
Qwen/Qwen3-Embedding-0.6B give better results than the bundled model.

    python examples/semantic_search.py [MODEL]      # without MODEL: the bundled one
"""

import sys

import numpy as np

from quire import LLM

TEXTS = ["Mia found a lantern in the forest.", "The dog slept in the sun.", "What is 34 + 57?",
         "Anna is 31 and lives in Oslo"]  # fmt: skip
QUESTIONS = [
    "A girl saw a lamp among the trees.",
    "What is 12 + 30?",
    "Ben is 40 and lives in Rome",
]


def vectors(llm: LLM, texts: list[str]) -> np.ndarray:
    """The normalised embedding of each text as a row, so that dot products are cosines."""
    return np.array([result.outputs.embedding for result in llm.embed(texts, use_tqdm=False)])


llm = LLM(*sys.argv[1:])
cosines = vectors(llm, QUESTIONS) @ vectors(llm, TEXTS).T
for question, row in zip(QUESTIONS, cosines, strict=True):
    print(question)
    for index in np.argsort(-row):
        print(f"    {row[index]:5.2f}  {TEXTS[index]}")
