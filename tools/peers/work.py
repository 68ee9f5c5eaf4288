"""The workloads: the same prompts, lengths and arrivals for every engine, from a seed per round."""

import random
from dataclasses import dataclass, replace

from .checkpoint import BYTES_A_WEIGHT, VOCAB, ModelShape
from .loop import TimedPrompt

# Requests per second in workloads with spread arrivals: about what the faster engines can serve.
RATE = 8.0


@dataclass(frozen=True)
class Workload:
    """A workload, which is a row of the comparison."""

    title: str
    count: int  # number of requests
    prompt: tuple[int, int]  # minimum and maximum prompt tokens, uniformly distributed
    output: tuple[int, int]  # minimum and maximum output tokens
    weights: str = "bf16"  # weight format
    kind: str = "serve"  # serve, start (process start to first token) or invariance
    spread: bool = False  # Poisson arrivals at RATE instead of all at once
    drafts: int = 0  # n-gram draft tokens per step
    phrases: int = 1  # number of times that a prompt repeats a phrase
    adapters: int = 0  # LoRA adapters, assigned to the requests in turn
    busy: int = 0  # unrelated processes that keep CPU cores busy
    cold: bool = False  # of a start: with empty caches
    # Figure that the ratio compares: rate (output tokens per second) or first (TTFT).
    by: str = "rate"

    def requests(self, seed: int) -> list[TimedPrompt]:
        """The requests of a round; rounds differ in the tokens, not in arrivals and lengths."""
        plan = random.Random(self.title)
        tokens = random.Random(f"{self.title} {seed}")
        timed_prompts = []
        now = 0.0
        for _ in range(self.count):
            length = plan.randint(*self.prompt)
            phrase = [tokens.randrange(300, VOCAB) for _ in range(-(-length // self.phrases))]
            timed_prompts.append(
                TimedPrompt((phrase * self.phrases)[:length], plan.randint(*self.output), now)
            )
            now += plan.expovariate(RATE) if self.spread else 0.0
        return timed_prompts

    def must_move(self, shape: ModelShape | None) -> float | None:
        """The minimum bytes to read: the weights once per step, and the KV cache of all positions
        before.

        None if there is no such bound: the engine chooses the number of steps, the workload is
        compute-bound, other processes use the memory, or engines store the weights differently.
        """
        if (
            self.kind != "serve"
            or self.spread
            or self.by == "first"
            or self.drafts
            or self.adapters
            or self.busy
            or shape is None
        ):
            return None
        requests = self.requests(0)
        steps = max(request.count for request in requests)
        cached_positions = sum(
            len(request.prompt) + i for request in requests for i in range(1, request.count)
        )
        return (
            steps * shape.read(self.count) * BYTES_A_WEIGHT[self.weights]
            + cached_positions * shape.kv_bytes
        )


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

# Of a GGUF file.
FILE_WORKS = {
    name: replace(work, weights="gguf")
    for name, work in {
        "one": WORKS["one"],
        "sixteen": WORKS["sixteen"],
        "sixty-four": WORKS["sixty-four"],
        "prompt-2048": Workload(
            "1 request, 2,048 in: time to the first token", 1, (2048, 2048), (4, 4), by="first"
        ),
        "prompt-16000": Workload(
            "1 request, 16,000 in: time to the first token", 1, (16000, 16000), (4, 4), by="first"
        ),
        "start": WORKS["start"],
        "cold-start": replace(
            WORKS["start"], title="first start of a file, to the first token", cold=True
        ),
    }.items()
}
