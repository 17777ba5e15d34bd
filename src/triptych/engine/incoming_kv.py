"""`IncomingKV`: what a worker knows of the KV that a request takes from another worker.

The tickets of its parts come with the request, or one by one while the prompt is still computed, the last together with the first token:
then it is complete. A part: known -> its read is ordered -> read; or it is not needed, because its blocks are here already.
"""

from dataclasses import dataclass, field

from triptych.output import KVTicket


@dataclass(slots=True)
class IncomingKV:
    tickets: list[KVTicket]
    is_complete: bool
    deadline: float  # for the rest of the parts, of which the copies, too
    num_ordered: int = 0  # parts
    unread: set[int] = field(default_factory=set[int])  # first blocks of the parts that are ordered and not read yet

    @property
    def num_tokens(self) -> int:
        return self.tickets[-1].num_tokens

    @property
    def is_here(self) -> bool:
        return self.is_complete and self.num_ordered == len(self.tickets) and not self.unread

    def take(self, tickets: tuple[KVTicket, ...], block_size: int) -> None:
        """A part that comes again is known, and one that does not follow what is known will come again with the last."""
        for ticket in tickets:
            if ticket.first_block * block_size == self.num_tokens:
                self.tickets.append(ticket)
