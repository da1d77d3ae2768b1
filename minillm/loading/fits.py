"""Check before any allocation whether a model fits on the device. If not, find a quantization that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from minillm.errors import CapacityError, DownloadError
from minillm.fit.budget import Budget, Fit
from minillm.fit.sizes import SizedModel, in_low_bits, quantized, ranked, shape_of, sized_versions
from minillm.fit.verdicts import order_of_choice
from minillm.fit.weights import weights_in_memory
from minillm.model.config import ModelConfig
from minillm.model.loader import parameter_shapes
from minillm.model.shard import Shard
from minillm.progress import OnMessage, OnProgress, ignore_progress, size
from minillm.weights.manifest import FULL, load_manifest
from minillm.weights.resolve import resolve
from minillm.weights.stored import StoredTensor


def check_fits(name: str, model: ModelConfig, tensors: Iterable[StoredTensor], shard: Shard, budget: Budget) -> None:
    """Raise CapacityError if a rank's part of a model does not fit into ``budget``.

    The budget must suffice for the weights, one step, and a short context.
    """
    whole, local = dict(parameter_shapes(model)), dict(parameter_shapes(shard.local(model)))

    def share(tensor: StoredTensor) -> float:
        if tensor.name in whole:
            return math.prod(local[tensor.name]) / math.prod(whole[tensor.name])
        return 1 / shard.size  # stored tensors of quantized matrices, such as packed levels and scales

    tensors, shape = tuple(tensors), shape_of(model)
    itself = SizedModel(name, tensors, shape, 0)
    fit = budget.fit(weights_in_memory(tensors, itself.layout(budget), share), shape)
    if fit.needed <= budget.available:
        return
    raise CapacityError(f"{name} needs {_needs(fit, budget)}, and {budget.where()}; {_alternative(itself, budget)}")


def _needs(fit: Fit, budget: Budget) -> str:
    once_loaded = fit.weights.memory + fit.copied + budget.draft_bytes + fit.steps + fit.least_context
    draft = f"{size(budget.draft_bytes)} of its draft model, " if budget.draft_bytes else ""
    more = f" ({size(fit.weights.loading)} more while they are loaded)" if once_loaded <= budget.available else ""
    copy = f", {size(fit.copied)} for their 16-bit copy" if fit.copied else ""
    return (
        f"{size(fit.weights.memory)} of weights{copy}{more}, {draft}{size(fit.steps)} for the steps and at least "
        f"{size(fit.least_context)} of context"
    )


def _alternative(model: SizedModel, budget: Budget) -> str:
    """Return the end of an error message: a quantization that would fit, or general advice."""
    name = model.name
    entry = load_manifest().models.get(name.partition(":")[0])
    forms = [] if entry is None else sized_versions(entry)
    if fitting := ranked([form for form in forms if form.name != name], budget):
        best, fit = fitting[0]
        return f"{best.name} ({size(fit.weights.memory)}) would fit: {best.command}"
    others = [way for form in forms for way in in_low_bits(form, budget)]
    if fitting := ranked(in_low_bits(model, budget), budget) or ranked(others, budget):
        best, fit = fitting[0]
        return f"quantized further, {best.name} ({size(fit.weights.memory)}) would fit: {best.command}"
    advice = "use a smaller model, or the CPU" if budget.on_gpu else "use a smaller model"
    if budget.on_gpu:
        advice += ", or shard it over several GPUs (tensor_parallel_size)"
    if len(forms) > 1:
        least = min(form.fit(budget).weights.memory for form in forms)
        return f"none of its quantizations would fit, the smallest takes {size(least)}; {advice}"
    if budget.on_gpu and (not forms or quantized(forms[0])):
        advice = f"`minillm fit {name}` shows whether --quantize helps; else {advice}"
    return advice


def choose_form(
    name: str,
    budget: Callable[[], Budget],
    on_progress: OnProgress = ignore_progress,
    on_message: OnMessage = lambda message: None,
    bandwidth: Callable[[], float | None] = lambda: None,
) -> str:
    """Choose the quantization of a model: the best one that fits on the device. Return its name, such as ``model:q4``.

    The choice is among the quantizations in weights.toml. If there are none, ``name`` is returned unchanged. Downloaded
    quantizations are preferred; otherwise the chosen one is downloaded. If that fails, the next best quantization is
    tried.

    Args:
        budget: returns the device's memory. It is called only if there is a choice.
        bandwidth: returns the device's memory bandwidth in bytes per second, or None. Called only if there is a choice.
        on_message: called with a line about the choice.

    Raises:
        DownloadError: no fitting quantization could be downloaded.
    """
    entry = load_manifest().models.get(name)
    if entry is None or not entry.forms:
        return name
    order, fitting = order_of_choice(sized_versions(entry), budget(), bandwidth())
    for number, (model, fit) in enumerate(order, 1):
        try:
            resolve(model.name, on_progress=on_progress, on_message=on_message)
        except DownloadError as error:
            if number == len(order):
                raise
            on_message(f"{error}; trying {_full_name(order[number][0].name)}")
        else:
            on_message(_chosen(model, fit, [each for each, _ in fitting]))
            return model.name
    return name  # no quantization fits; loading the model will raise the error


def _chosen(model: SizedModel, fit: Fit, fitting: Sequence[SizedModel]) -> str:
    lies = f"{size(fit.weights.memory)} of weights, {fit.context:,} tokens of context"
    if model is fitting[0]:
        return f"taking {_full_name(model.name)}, the best quantization that fits ({lies})"
    here = "is here" if model.downloaded else "is available"
    return f"taking {_full_name(model.name)}, which {here} ({lies}); {_full_name(fitting[0].name)} would also fit"


def _full_name(name: str) -> str:
    return name if ":" in name else f"{name}:{FULL}"
