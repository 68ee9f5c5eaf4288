"""The works: the same prompts, lengths and arrivals for every engine, drawn from the seed of the
round.
"""

import random
from dataclasses import dataclass

from .checkpoint import BYTES_A_WEIGHT, VOCAB, ModelShape
from .loop import TimedPrompt

# requests a second, where arrivals are spread: about as many as the faster engines can serve
RATE = 8.0


@dataclass(frozen=True)
class Workload:
    """A row of the comparison.

    `kind` is serve, start (a fresh process to its first token) or invariance.
    """

    title: str
    count: int
    prompt: tuple[int, int]  # shortest and longest, drawn evenly
    output: tuple[int, int]
    weights: str = "bf16"
    kind: str = "serve"
    spread: bool = False
    drafts: int = 0  # tokens that the text's own n-grams draft a step
    phrases: int = 1  # that a prompt says, one like the other
    adapters: int = 0  # of low rank, which the requests take in turn
    busy: int = 0  # processes that compute beside it and have nothing to do with it
    # what the ratio compares: output tokens a second, or first: the time to the first token
    by: str = "rate"

    def requests(self, seed: int) -> list[TimedPrompt]:
        """The requests of a round; arrivals and lengths are the same in every round, the tokens
        differ.
        """
        plan = random.Random(self.title)
        tokens = random.Random(f"{self.title} {seed}")
        found = []
        now = 0.0
        for _ in range(self.count):
            length = plan.randint(*self.prompt)
            phrase = [tokens.randrange(300, VOCAB) for _ in range(-(-length // self.phrases))]
            found.append(
                TimedPrompt((phrase * self.phrases)[:length], plan.randint(*self.output), now)
            )
            now += plan.expovariate(RATE) if self.spread else 0.0
        return found

    def must_move(self, shape: ModelShape) -> float | None:
        """Bytes that any engine must read: the weights once a step, and the keys and values of each
        position before.

        None where the engine chooses the number of steps, where arithmetic is the limit, or others
        use the memory.
        """
        if (
            self.kind != "serve"
            or self.spread
            or self.by == "first"
            or self.drafts
            or self.adapters
            or self.busy
        ):
            return None
        requests = self.requests(0)
        steps = max(request.count for request in requests)
        kept = sum(len(request.prompt) + i for request in requests for i in range(1, request.count))
        return steps * shape.read(self.count) * BYTES_A_WEIGHT[self.weights] + kept * shape.kv_bytes


WORKS = {
    "one": Workload("1 request, 128 in, 128 out", 1, (128, 128), (128, 128)),
    "sixteen": Workload("16 requests, 128 in, 128 out", 16, (128, 128), (128, 128)),
    "sixty-four": Workload("64 requests, 128 in, 128 out", 64, (128, 128), (128, 128)),
    "sixteen-adapter": Workload(
        "16 requests of one LoRA adapter", 16, (128, 128), (128, 128), adapters=1
    ),
    "sixteen-adapters": Workload(
        "16 requests, each of its own LoRA adapter", 16, (128, 128), (128, 128), adapters=16
    ),
    "one-busy": Workload("1 request beside 1 busy process", 1, (128, 128), (128, 128), busy=1),
    "one-busy4": Workload("1 request beside 4 busy processes", 1, (128, 128), (64, 64), busy=4),
    "phrases": Workload("1 request, 8 phrases in, 128 out", 1, (128, 128), (128, 128), phrases=8),
    "phrases-drafts": Workload(
        "1 request, 8 phrases in, 128 out, 4 drafts by n-grams",
        1,
        (128, 128),
        (128, 128),
        phrases=8,
        drafts=4,
    ),
    "arrivals": Workload(
        "64 requests, 32 to 512 in, 16 to 256 out, 8 a second",
        64,
        (32, 512),
        (16, 256),
        spread=True,
    ),
    "prompt": Workload(
        "1 request, 3,900 in: time to the first token", 1, (3900, 3900), (4, 4), by="first"
    ),
    "long": Workload("16 requests, 2,048 in, 64 out", 16, (2048, 2048), (64, 64)),
    "start": Workload(
        "process start to the first token", 1, (128, 128), (1, 1), kind="start", by="first"
    ),
    "invariance": Workload(
        "24 requests alone and in one batch", 24, (16, 128), (64, 64), kind="invariance"
    ),
    "one-int8": Workload(
        "1 request, 128 in, 128 out, int8", 1, (128, 128), (128, 128), weights="int8"
    ),
    "sixteen-int8": Workload(
        "16 requests, 128 in, 128 out, int8", 16, (128, 128), (128, 128), weights="int8"
    ),
    "one-int4": Workload(
        "1 request, 128 in, 128 out, int4", 1, (128, 128), (128, 128), weights="int4"
    ),
    "sixteen-int4": Workload(
        "16 requests, 128 in, 128 out, int4", 16, (128, 128), (128, 128), weights="int4"
    ),
    "sixty-four-int8": Workload(
        "64 requests, 128 in, 128 out, int8", 64, (128, 128), (128, 128), weights="int8"
    ),
    "sixty-four-int4": Workload(
        "64 requests, 128 in, 128 out, int4", 64, (128, 128), (128, 128), weights="int4"
    ),
    "one-q4_k_m": Workload(
        "1 request, 128 in, 128 out, Q4_K_M", 1, (128, 128), (128, 128), weights="q4_k_m"
    ),
    "sixteen-q4_k_m": Workload(
        "16 requests, 128 in, 128 out, Q4_K_M", 16, (128, 128), (128, 128), weights="q4_k_m"
    ),
}
