"""`EngineCounters`: what an engine has done since it started; only ever grows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from triptych.engine.events import EncodeFailed, EngineEvent, Failed
from triptych.errors import FailureReason
from triptych.output import ModelRunnerOutput, SchedulerOutput


def _none_yet() -> dict[str, int]:
    return {reason.value: 0 for reason in FailureReason}  # all of them: /metrics reads from another thread, and shows zeros


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0  # that computed something
    tokens_computed: int = 0  # prompt and decode tokens through the language model
    tokens_sampled: int = 0
    items_encoded: int = 0
    items_loaded: int = 0
    items_published: int = 0  # after their encode
    items_republished: int = 0  # resident already, and asked for again
    kv_loads: int = 0
    kv_loads_failed: int = 0
    encode_seconds: float = 0.0
    item_loads_failed: dict[str, int] = field(default_factory=_none_yet)  # by reason, as those below
    encodes_failed: dict[str, int] = field(default_factory=_none_yet)  # calls, not items
    requests_failed: dict[str, int] = field(default_factory=_none_yet)  # for want of an item or of KV blocks

    def count(self, output: SchedulerOutput, result: ModelRunnerOutput, events: Sequence[EngineEvent]) -> None:
        self.steps += bool(output.num_scheduled_tokens or output.encodes)
        self.tokens_computed += sum(output.num_scheduled_tokens.values())
        self.tokens_sampled += len(result.sampled)
        self.items_encoded += len(output.encodes) - len(result.failed_encodes)
        self.encode_seconds += result.encode_s
        if result.ec_connector_output is not None:
            self.items_loaded += len(result.ec_connector_output.finished_loads)
            num_again = len(result.ec_connector_output.published.keys() & output.ec_connector_metadata.republish)
            self.items_published += len(result.ec_connector_output.published) - num_again
            self.items_republished += num_again
            for reason in result.ec_connector_output.failed_loads.values():
                self.item_loads_failed[reason] += 1
        if result.kv_connector_output is not None:
            self.kv_loads += len(result.kv_connector_output.finished_loads)
            self.kv_loads_failed += len(result.kv_connector_output.failed_loads)
        for event in events:
            if isinstance(event, EncodeFailed):
                self.encodes_failed[event.reason] += 1
            elif isinstance(event, Failed) and event.reason is not None:
                self.requests_failed[event.reason] += 1
