"""Builds the engine that the settings ask for. torch is imported only when it computes."""

from collections.abc import Callable

from pdserve.config import EngineConfig, ModelConfig
from pdserve.core.events import Role
from pdserve.engine.engine import Engine
from pdserve.engine.interfaces import ModelRunner
from pdserve.engine.settings import SchedulerSettings


def engine_factory(model: ModelConfig, config: EngineConfig, role: Role) -> Callable[[], Engine]:
    """What an engine thread calls, in the thread, to get its engine.

    The factory raises StartupError when the model or the machine cannot serve.
    """
    settings = SchedulerSettings(
        step_tokens=config.step_tokens,
        max_sequences=config.max_running,
        max_waiting=config.max_waiting,
        max_context_tokens=model.max_context_tokens,
    )
    if config.kind == "scripted":
        return lambda: Engine(_scripted_runner(config), settings)
    # A prefill worker has no step of decode alone that would be worth a graph's memory.
    graph_rows = config.max_running if config.decode_graphs and role is Role.DECODE else 0
    return lambda: Engine(_torch_runner(model, config, graph_rows), settings)


def _torch_runner(model: ModelConfig, config: EngineConfig, max_graph_rows: int) -> ModelRunner:
    import torch

    from pdserve.engine.checkpoint import ensure_model
    from pdserve.engine.model_runner import TorchModelRunner

    # The engine's thread is the one that computes.
    torch.set_num_threads(1)
    folder = ensure_model(model.path)
    if config.num_blocks is not None:
        return TorchModelRunner(folder, model.dtype, config.device, config.num_blocks, max_graph_rows=max_graph_rows)
    return TorchModelRunner.within_memory(
        folder, model.dtype, config.device, config.kv_memory_bytes, max_graph_rows=max_graph_rows
    )


def _scripted_runner(config: EngineConfig) -> ModelRunner:
    from pdserve.engine.scripted import SCRIPTED_GEOMETRY, Script, ScriptedRunner

    script = Script(
        step_s=config.scripted.step_s,
        prefill_token_s=config.scripted.prefill_token_s,
        decode_row_s=config.scripted.decode_row_s,
        echo=config.scripted.echo,
    )
    num_blocks = config.num_blocks or config.kv_memory_bytes // SCRIPTED_GEOMETRY.block_bytes
    return ScriptedRunner(num_blocks, script)
