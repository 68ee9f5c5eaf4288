"""What a drafter in the step proposed, for tests to look at."""

from quire.serving.engine.step_record import Observer


class Recorded(Observer):
    """All that steps drafted, by the text that it was to follow."""

    def __init__(self):
        self.proposed: dict[tuple[int, ...], list[int]] = {}

    @classmethod
    def of(cls, engine) -> "Recorded":
        """Observes an engine, from now on."""
        engine.observers.append(recorded := cls())
        return recorded

    def observe(self, record):
        for output in record.result.outputs if record.result else ():
            seq = output.item.seq
            if output.item.num_to_draft and seq.draft.proposals and seq.finish_reason is None:
                self.proposed[tuple(seq.tokens)] = list(seq.draft.proposals)
