"""Facts about an engine that its clients need."""

from minillm.engine.engine import Engine
from minillm.service.messages import Loaded


def loaded(engine: Engine, model_name: str, seconds: float) -> Loaded:
    """Return the facts about an engine as an event. ``seconds`` is the time that loading took."""
    model = engine.runner.model
    return Loaded(
        model=model_name,
        source=engine.source,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=engine.max_model_len,
        block_size=engine.cache.block_size,
        num_blocks=engine.cache.num_blocks,
        num_host_blocks=engine.scheduler.preemption.swap.num_blocks,
        block_bytes=model.config.kv_bytes_per_token(model.kv_element_size) * engine.cache.block_size,
        has_chat_template=engine.tokenizer is not None and engine.tokenizer.has_chat_template,
        has_thinking_switch=engine.tokenizer is not None and engine.tokenizer.has_thinking_switch,
        has_reasoning_tags=engine.requests.reasoning.tags is not None,
        seconds=seconds,
        max_num_seqs=engine.scheduler.max_num_seqs,
        vocab_size=model.config.vocab_size,
        defaults=dict(engine.defaults),
        chat_template="" if engine.tokenizer is None else engine.tokenizer.chat_template,
    )
