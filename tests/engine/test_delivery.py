"""What readers are brought is in order, whatever the deliveries overlap with."""

import asyncio
from typing import Any

import pytest

from quire.serving.engine.delivery import SLICE, Inbox, Listener, Outbox


class Told:
    """A request of which there is ever more to read."""

    def __init__(self, name: str):
        self.request_id = name
        self.finished = False
        self.count = 0

    def read(self) -> int:
        self.count += 1
        return self.count


def listen(outbox: Outbox, told: Told) -> Inbox:
    inbox = Inbox()
    outbox.listeners[told.request_id] = Listener(inbox, 0, lambda request: told.read())
    return inbox


async def taken(inbox: Inbox, number: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < number:
        found += [item for _, item in await asyncio.wait_for(inbox.take(), 5)]
    return found


@pytest.mark.parametrize("readers", [1, SLICE, SLICE + 1, 4 * SLICE])
def test_the_last_delivery_does_not_overtake_the_one_before(readers):
    """What ends as the engine falls idle is sent at once, though the loop may still be giving out
    what came before.
    """

    async def main() -> list[int]:
        outbox = Outbox(lambda: 0.0)
        crowd = [Told(f"{number}") for number in range(readers)]
        inboxes = [listen(outbox, told) for told in crowd]
        outbox.note(crowd)
        outbox.send()
        last = crowd[-1]
        last.finished = True
        outbox.note([last])
        outbox.send()
        return await taken(inboxes[-1], 2)

    assert asyncio.run(main()) == [1, 2]


def test_what_is_due_waits_for_the_delivery_before():
    async def main() -> None:
        outbox = Outbox(lambda: 1000.0)
        crowd = [Told(f"{number}") for number in range(SLICE + 1)]
        inboxes = [listen(outbox, told) for told in crowd]
        outbox.note(crowd)
        outbox.send()
        outbox.note(crowd)
        outbox.sent = 0.0  # long ago
        outbox.deliver_due()
        assert [await taken(inbox, 1) for inbox in inboxes] == [[1]] * len(crowd)
        outbox.deliver_due()
        assert [await taken(inbox, 1) for inbox in inboxes] == [[2]] * len(crowd)

    asyncio.run(main())


def test_a_loop_that_closed_delays_nobody():
    outbox = Outbox(lambda: 1000.0)
    gone = Told("gone")
    here = Told("here")

    async def leave() -> None:
        listen(outbox, gone)
        outbox.note([gone])
        outbox.send()  # and ends before it is given out

    async def stay() -> None:
        inbox = listen(outbox, here)
        outbox.note([gone, here])
        outbox.sent = 0.0
        outbox.deliver_due()
        assert await taken(inbox, 1) == [1]

    asyncio.run(leave())
    asyncio.run(stay())
    assert not outbox.delivering()
