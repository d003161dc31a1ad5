"""Builds the engine that the settings ask for. torch is imported only when it computes."""

from collections.abc import Callable

from pdserve.config import EngineConfig, ModelConfig
from pdserve.engine.engine import Engine
from pdserve.engine.interfaces import ModelRunner
from pdserve.engine.settings import SchedulerSettings


def engine_factory(model: ModelConfig, config: EngineConfig) -> Callable[[], Engine]:
    """What an engine thread calls, in the thread, to get its engine.

    The factory raises StartupError when the model or the machine cannot serve.
    """
    settings = SchedulerSettings(
        step_tokens=config.step_tokens, max_sequences=config.max_running, max_waiting=config.max_waiting
    )
    build_runner = _scripted_runner if config.kind == "scripted" else _torch_runner
    return lambda: Engine(build_runner(model, config), settings)


def _torch_runner(model: ModelConfig, config: EngineConfig) -> ModelRunner:
    import torch

    from pdserve.engine.checkpoint import ensure_model
    from pdserve.engine.model_runner import TorchModelRunner

    # The engine's thread is the one that computes.
    torch.set_num_threads(1)
    folder = ensure_model(model.path)
    graph_rows = config.max_running if config.decode_graphs else 0
    if config.num_blocks is not None:
        return TorchModelRunner(folder, model.dtype, config.device, config.num_blocks, max_graph_rows=graph_rows)
    return TorchModelRunner.within_memory(
        folder, model.dtype, config.device, config.kv_memory_bytes, max_graph_rows=graph_rows
    )


def _scripted_runner(model: ModelConfig, config: EngineConfig) -> ModelRunner:
    from pdserve.engine.scripted import SCRIPTED_GEOMETRY, Script, ScriptedRunner

    script = Script(
        step_s=config.scripted.step_s,
        prefill_token_s=config.scripted.prefill_token_s,
        decode_row_s=config.scripted.decode_row_s,
    )
    num_blocks = config.num_blocks or config.kv_memory_bytes // SCRIPTED_GEOMETRY.block_bytes
    return ScriptedRunner(num_blocks, script)
