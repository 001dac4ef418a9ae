"""Cut models of every build: the same numbers, the same object, the same keys; and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import evenload
from evenload.errors import ConfigError, StepError
from evenload.training.parallel.model_split import recompute
from evenload.training.parallel.model_split.transfers import ModelSplit, split_of
from tests.unit.model_split.models import (
    CASES,
    Backwards,
    Block,
    Gpt,
    HeadedLikeHuggingFace,
    Ladder,
    SharedScale,
    chain,
)


def numbers(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def learn(model: nn.Module, case: Any, inputs: Any) -> dict[str, Any]:
    """Forward, backward, clipping, two updates: everything that came out."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    outputs, grads = [], []
    for _ in range(2):
        out = case.call(model, inputs)
        outputs += [leaf.detach().clone() for leaf in numbers(out)]
        sum((leaf**2).sum() for leaf in numbers(out)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        grads += [norm, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return {"outputs": outputs, "grads": grads, "state": {k: v.clone() for k, v in model.state_dict().items()}}


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return (
        all(torch.equal(a, b) for a, b in zip(first["outputs"], second["outputs"], strict=True))
        and all(torch.equal(a, b) for a, b in zip(first["grads"], second["grads"], strict=True))
        and list(first["state"]) == list(second["state"])
        and all(torch.equal(first["state"][key], second["state"][key]) for key in first["state"])
    )


def placement(model: nn.Module) -> ModelSplit:
    found = split_of(model)
    assert found is not None
    return found


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_cut_model_computes_what_the_whole_one_does(
    name: str, with_example: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES[name]
    torch.manual_seed(1)
    model, inputs = case.build(), case.inputs()
    whole = copy.deepcopy(model)
    before = {id(p): key for key, p in model.named_parameters(remove_duplicate=False)}
    state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    example = {"example": inputs} if with_example else {}
    placed = evenload.place(model, ["cpu", "cpu"], **example)
    assert placed is model
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert {id(p): key for key, p in model.named_parameters(remove_duplicate=False)} == before
    pieces = placement(model).pieces
    assert all(piece.num_layers for piece in pieces)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("evenload: ")]
    assert len(lines) == 2
    assert all(piece.first in line and "cpu" in line for piece, line in zip(pieces, lines, strict=True))
    assert all((piece.expected_s is not None) == with_example for piece in pieces)
    assert same(learn(model, case, inputs), learn(whole, case, inputs))


def test_copies_pickles_and_files_are_cut_models_too() -> None:
    case = CASES["gpt"]
    torch.manual_seed(2)
    model, inputs = evenload.place(case.build(), ["cpu", "cpu"]), case.inputs()
    whole = case.build()
    whole.load_state_dict(model.state_dict())  # a checkpoint of a cut model, in a whole one
    copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    expected = learn(whole, case, inputs)
    for other in (copied, pickled, saved, model):
        assert split_of(other) == placement(model)
        assert same(learn(other, case, inputs), expected)
    again = evenload.place(case.build(), ["cpu", "cpu"])
    again.load_state_dict(whole.state_dict())  # and back
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_moved_to_one_device_it_still_works() -> None:
    case = CASES["headed"]
    torch.manual_seed(3)
    model, inputs = evenload.place(case.build(), ["cpu", "cpu"]), case.inputs()
    whole = copy.deepcopy(model)
    assert same(learn(model.to("cpu"), case, inputs), learn(whole, case, inputs))


def test_limits_say_who_gets_how_much() -> None:
    def shares(*limits: str) -> list[int]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        devices = [("cpu", limit) for limit in limits]
        return [piece.num_layers for piece in placement(evenload.place(model, devices)).pieces]

    assert shares("1GiB", "1GiB") == [4, 4]
    assert shares("3GiB", "1GiB") == [6, 2]
    assert shares("1MB", "1MB", "2MB") == [2, 2, 4]
    assert shares("70KB", "500KB") == [1, 7]  # one layer with all that belongs to it: 66,560 bytes
    assert shares("70KB", "600KB") == [0, 8]  # nothing is gained on a device that would be fuller than the other


def test_the_memory_of_the_optimizer_is_the_users_to_say() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    limits = [("cpu", "80KB"), ("cpu", "80KB")]
    with pytest.raises(ConfigError, match="a plain SGD needs less: optimizer_states=0"):
        evenload.place(build(), limits)
    evenload.place(build(), limits, optimizer_states=0)
    frozen = build()
    frozen.requires_grad_(False)
    frozen[0].requires_grad_(True)
    evenload.place(frozen, [("cpu", "70KB"), ("cpu", "60KB")])


def test_an_example_counts_activations() -> None:
    model, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), torch.randn(1000, 4)
    with pytest.raises(ConfigError, match=r"needs .*KiB of activations of the example.*smaller micro-batch"):
        evenload.place(model, [("cpu", "20KB"), ("cpu", "20KB")], example=x)
    evenload.place(model, [("cpu", "20KB"), ("cpu", "20KB")])


def test_the_order_is_that_of_the_first_calls() -> None:
    model = evenload.place(Backwards(), ["cpu", "cpu"], example=torch.randn(3, 6))
    first, last = placement(model).pieces
    assert (first.first, last.last) == ("first", "last")
    model = evenload.place(Backwards(), ["cpu", "cpu"])
    assert placement(model).pieces[0].first == "last"


def test_tied_weights_stay_tied_and_together() -> None:
    model = evenload.place(HeadedLikeHuggingFace(), ["cpu", "cpu"])
    assert model.head.weight is model.transformer.wte.weight
    names = {piece.first for piece in placement(model).pieces} | {piece.last for piece in placement(model).pieces}
    assert "head" not in names  # it is none of the chain: it lies with the embedding
    assert placement(model).num_layers == 1 + 4 + 1


def test_blocks_stay_whole_unless_nothing_else_fits() -> None:
    def build() -> nn.Module:
        return nn.Sequential(Block(64), Block(64))

    whole = placement(evenload.place(build(), ["cpu", "cpu"]))
    assert (whole.num_layers, whole.pieces[0].last) == (2, "0")
    # A block with all that belongs to it has 267,264 bytes, its largest layer 133,120.
    opened = placement(evenload.place(build(), [("cpu", "200KB")] * 4))
    assert opened.num_layers == 6  # norm, up, down of each
    x = torch.randn(2, 64)
    torch.manual_seed(0)
    cut = build()
    expected = cut(x)
    evenload.place(cut, [("cpu", "200KB")] * 4)
    assert torch.equal(cut(x), expected)


def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    model = evenload.place(Gpt(), ["cpu", "cpu"])
    for wrong in (torch.full((2, 3), 99), torch.zeros(2, 50, dtype=torch.long)):  # in a layer; between layers
        with pytest.raises((IndexError, RuntimeError)):
            model(wrong)
        assert torch.overrides._get_current_function_mode_stack() == []
    assert model(torch.zeros(2, 3, dtype=torch.long)).shape == (2, 3, 32)


def test_a_model_inside_a_cut_model_and_one_that_calls_itself() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, again: bool = True) -> torch.Tensor:
            x = self.two(self.one(x))
            return self(x, again=False) if again else x

    model = Twice()
    x = torch.randn(2, 4)
    expected = model(x)
    assert torch.equal(evenload.place(model, ["cpu", "cpu"])(x), expected)
    assert torch.overrides._get_current_function_mode_stack() == []


def test_placed_twice(capsys: pytest.CaptureFixture[str]) -> None:
    model = evenload.place(chain(), ["cpu", "cpu"])
    hooks = len(model._forward_pre_hooks)
    capsys.readouterr()
    assert evenload.place(model, ["cpu", "cpu"]) is model
    assert len(model._forward_pre_hooks) == hooks
    assert capsys.readouterr().out == ""
    with pytest.raises(ConfigError, match="this Sequential is split already, over cpu, cpu; a model can be split once"):
        evenload.place(model, ["cpu", "cpu", "cpu"])
    with pytest.raises(ConfigError, match=r"Sequential\.0 is split already"):
        evenload.place(nn.Sequential(model, nn.Linear(4, 4)), ["cpu", "cpu"])


@pytest.mark.parametrize(
    ("model", "devices", "further", "told"),
    [
        (chain, "cuda:0,cuda:1", {}, r"devices=cuda:0,cuda:1\): expected a list such as"),
        (chain, 2, {}, r"devices=2\): expected a list"),
        (chain, [], {}, "at least two devices, but got none"),
        (chain, ["cpu"], {}, "at least two devices, but got cpu"),
        (chain, {"cpu": "1GiB"}, {}, "at least two devices"),
        (chain, ["cpu", "cuda:77"], {}, r"there is no cuda:77; torch sees \d+ GPUs.*evenload doctor"),
        (chain, ["cpu", "tpu"], {}, "tpu"),
        (chain, ["cpu", "meta"], {}, r"meta is neither a GPU \(cuda:0\) nor the CPU"),
        (chain, ["cpu", 1], {}, "1 is not a device"),
        (chain, [("cpu", "6 apples"), "cpu"], {}, "an amount of memory such as .6GiB.*'6 apples'"),
        (chain, [("cpu", 0), "cpu"], {}, "an amount of memory"),
        (chain, [("cpu", "1GiB", 3), "cpu"], {}, r"is not a pair \(device, limit\)"),
        (chain, None, {}, r"this process has one device \(cpu\).*evenload run -d 0\+1"),
        (lambda: nn.Linear(4, 4), ["cpu", "cpu"], {}, "Linear is one layer"),
        (nn.Identity, ["cpu", "cpu"], {}, "Identity has no parameters"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), ["cpu", "cpu"], {}, r"uninitialised lazy parameters \(0.weight\)"),
        (lambda: nn.Linear(4, 4, device="meta"), ["cpu", "cpu"], {}, "on the meta device"),
        (lambda: nn.DataParallel(chain()), ["cpu", "cpu"], {}, "give place the bare model"),
        (lambda: [chain()], ["cpu", "cpu"], {}, "place expects a model .*, got a list"),
        (chain, ["cpu", "cpu"], {"optimizer_states": -1}, r"optimizer_states=-1\): expected the number"),
        (chain, ["cpu", "cpu"], {"returns": "home"}, r"returns='home'\): expected first"),
        (chain, ["cpu", "cpu"], {"example": torch.randn(2, 99)}, r"can't be run on the example \(RuntimeError"),
    ],
)
def test_what_is_refused(model: Any, devices: Any, further: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        evenload.place(model(), devices, **further)


def test_devices_too_small_are_told_with_the_figures_and_nothing_is_moved() -> None:
    model = chain()
    data = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(ConfigError) as told:
        evenload.place(model, [("cpu", "2KB"), ("cpu", 3000)])
    for figure in (
        "needs 11.8 KiB",
        "3.0 KiB of parameters",
        "cpu 2.0 KiB (as set)",
        "cpu 2.9 KiB (as set)",
        "4.9 KiB",
    ):
        assert figure in str(told.value), told.value
    with pytest.raises(ConfigError, match=r"no cut of Sequential fits.*the largest, 2\.0, needs 4\.2 KiB"):
        evenload.place(model, [("cpu", "4KB")] * 4)
    assert [p.data_ptr() for p in model.parameters()] == data
    assert split_of(model) is None
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_shared_small_parameters_keep_nothing_together() -> None:
    model = evenload.place(SharedScale(), ["cpu", "cpu"])
    assert [piece.num_layers for piece in placement(model).pieces] == [2, 2]
    assert len({id(part.gain) for part in model.parts.values()}) == 1


def test_skips_may_cross_a_cut() -> None:
    assert [piece.num_layers for piece in placement(evenload.place(Ladder(), ["cpu"] * 3)).pieces] == [3, 2, 1]


class Dropping(nn.Module):
    def __init__(self, dropout: float, reentrant: bool, together: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8, dropout, batch_first=True) for _ in range(2))
        self.reentrant, self.together = reentrant, together

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        if self.together:
            return checkpoint(lambda h: self.layers[1](self.layers[0](h)), x, use_reentrant=self.reentrant)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_dropout_beyond_a_cut_is_refused(
    reentrant: bool, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's generator stands in for a GPU's that checkpoint doesn't put back."""
    x = torch.randn(2, 3, 8)
    monkeypatch.setattr(recompute, "generator_state", lambda device: torch.get_rng_state())
    wrong = evenload.place(Dropping(0.5, reentrant, together), ["cpu", "cpu"])
    with pytest.raises(
        StepError, match=r"a TransformerEncoderLayer on cpu draws random numbers inside torch.utils.checkpoint"
    ):
        wrong(x)
    assert torch.overrides._get_current_function_mode_stack() == []
    wrong.eval()(x)
    for fine in (Dropping(0.0, reentrant, together), Dropping(0.5, reentrant, together)):
        model = evenload.place(fine, ["cpu", "cpu"])
        if fine.layers[0].dropout.p:
            monkeypatch.undo()  # on the CPU itself nothing is wrong
        model(x.clone().requires_grad_()).sum().backward()
