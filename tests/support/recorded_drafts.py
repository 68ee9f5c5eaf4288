"""Records the proposals of a drafter that runs in the step."""

from quire.serving.engine.step_record import Observer


class Recorded(Observer):
    """All draft tokens that steps proposed, by the tokens before them."""

    def __init__(self):
        self.proposed: dict[tuple[int, ...], list[int]] = {}

    @classmethod
    def of(cls, engine) -> "Recorded":
        """Start to observe an engine."""
        engine.observers.append(recorded := cls())
        return recorded

    def observe(self, record):
        for output in record.result.outputs if record.result else ():
            seq = output.item.seq
            if output.item.num_to_draft and seq.draft.proposals and seq.finish_reason is None:
                self.proposed[tuple(seq.tokens)] = list(seq.draft.proposals)
