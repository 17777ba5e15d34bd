"""`EngineCounters`: what an engine has done since it started; only ever grows."""

from dataclasses import dataclass

from triptych.output import ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class EngineCounters:
    steps: int = 0  # that computed something
    tokens_computed: int = 0  # prompt and decode tokens through the language model
    tokens_sampled: int = 0
    items_encoded: int = 0
    item_encodes_failed: int = 0
    items_loaded: int = 0
    item_loads_failed: int = 0
    kv_loads: int = 0
    kv_loads_failed: int = 0
    encode_seconds: float = 0.0

    def count(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        self.steps += bool(output.num_scheduled_tokens or output.encodes)
        self.tokens_computed += sum(output.num_scheduled_tokens.values())
        self.tokens_sampled += len(result.sampled)
        self.items_encoded += len(output.encodes) - len(result.failed_encodes)
        self.item_encodes_failed += len(result.failed_encodes)
        self.encode_seconds += result.encode_s
        if result.ec_connector_output is not None:
            self.items_loaded += len(result.ec_connector_output.finished_loads)
            self.item_loads_failed += len(result.ec_connector_output.failed_loads)
        if result.kv_connector_output is not None:
            self.kv_loads += len(result.kv_connector_output.finished_loads)
            self.kv_loads_failed += len(result.kv_connector_output.failed_loads)
