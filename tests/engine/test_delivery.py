"""Readers get updates in order, even if deliveries overlap."""

import asyncio
from typing import Any

import pytest

from quire.serving.engine.delivery import SLICE, Inbox, Listener, Outbox


class CountingRequest:
    """A request whose `read` returns 1, 2, 3..."""

    def __init__(self, name: str):
        self.request_id = name
        self.finished = False
        self.count = 0

    def read(self) -> int:
        self.count += 1
        return self.count


def add_listener(outbox: Outbox, counting_request: CountingRequest) -> Inbox:
    inbox = Inbox()
    outbox.listeners[counting_request.request_id] = Listener(
        inbox, 0, lambda request: counting_request.read()
    )
    return inbox


async def take_items(inbox: Inbox, count: int) -> list[Any]:
    items: list[Any] = []
    while len(items) < count:
        items += [item for _, item in await asyncio.wait_for(inbox.take(), 5)]
    return items


@pytest.mark.parametrize("readers", [1, SLICE, SLICE + 1, 4 * SLICE])
def test_final_delivery_stays_behind_earlier_ones(readers):
    """When the engine becomes idle, the last update is sent at once, although the event loop may
    still be delivering earlier ones.
    """

    async def main() -> list[int]:
        outbox = Outbox(lambda: 0.0)
        requests = [CountingRequest(f"{number}") for number in range(readers)]
        inboxes = [add_listener(outbox, request) for request in requests]
        outbox.note(requests)
        outbox.send()
        last_request = requests[-1]
        last_request.finished = True
        outbox.note([last_request])
        outbox.send()
        return await take_items(inboxes[-1], 2)

    assert asyncio.run(main()) == [1, 2]


def test_due_delivery_waits_for_the_previous_one():
    async def main() -> None:
        outbox = Outbox(lambda: 1000.0)
        requests = [CountingRequest(f"{number}") for number in range(SLICE + 1)]
        inboxes = [add_listener(outbox, request) for request in requests]
        outbox.note(requests)
        outbox.send()
        outbox.note(requests)
        outbox.sent = 0.0  # so that an update is due
        outbox.deliver_due()
        assert [await take_items(inbox, 1) for inbox in inboxes] == [[1]] * len(requests)
        outbox.deliver_due()
        assert [await take_items(inbox, 1) for inbox in inboxes] == [[2]] * len(requests)

    asyncio.run(main())


def test_closed_event_loop_delays_no_other_reader():
    outbox = Outbox(lambda: 1000.0)
    closed_request = CountingRequest("closed")
    open_request = CountingRequest("open")

    async def listen_and_close() -> None:
        add_listener(outbox, closed_request)
        outbox.note([closed_request])
        outbox.send()  # and the loop closes before the delivery

    async def listen_and_read() -> None:
        inbox = add_listener(outbox, open_request)
        outbox.note([closed_request, open_request])
        outbox.sent = 0.0
        outbox.deliver_due()
        assert await take_items(inbox, 1) == [1]

    asyncio.run(listen_and_close())
    asyncio.run(listen_and_read())
    assert not outbox.delivering()
