"""The gradient contract: what would make a gradient wrong is named, and nothing is trained with it."""

import copy
import gc
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import evenload
from evenload.errors import ConfigError, StepError
from evenload.testing import run_ranks
from evenload.training.step.engine import Engine
from tests.ranks.exact.ranks import run_split
from tests.ranks.wrong_uses import jobs
from tests.ranks.wrong_uses.jobs import Job, told_by_ranks


def _step_error(text):
    return pytest.raises(StepError, match=re.escape(text))


def _step_in_hook(model):
    """An optimizer for each parameter, in the hook that runs when its gradient is there, as torchtune does."""
    optimizers = {p: torch.optim.SGD([p], lr=0.01) for p in model.parameters()}

    def step_now(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)


@pytest.mark.parametrize("strategy", ["ddp", "dp"])
def test_an_optimizer_in_a_hook(init, strategy):
    model = nn.Linear(4, 1)
    _step_in_hook(model)
    with pytest.raises(ConfigError, match=r"Linear\.weight has a hook that runs when its gradient is accumulated"):
        Job(init(strategy=strategy), model=model)


def test_an_optimizer_in_a_hook_that_comes_later(init):
    job = Job(init())
    before = job.model.weight.detach().clone()
    for index, step in enumerate(job.loader):
        if index == 2:
            _step_in_hook(job.model)
            before = job.model.weight.detach().clone()
            with _step_error("A parameter of Linear has a hook that runs when its gradient is accumulated"):
                step.backward(job.loss)
            break
        job.step(step)
    assert torch.equal(job.model.weight, before)


def test_an_optimizer_in_a_hook_of_the_graph(init):
    # torch.distributed.optim._apply_optimizer_in_backward hangs its hooks there, out of the parameter's sight
    job = Job(init())
    optimizer = torch.optim.SGD([job.model.weight], lr=0.01)
    nodes = []
    for index, step in enumerate(job.loader):
        if index == 1:  # living nodes are looked for at the first step
            nodes.append(job.model.weight.expand_as(job.model.weight).grad_fn.next_functions[0][0])
            nodes[0].register_hook(lambda *_: optimizer.step())
            with _step_error("SGD stepped inside step.backward (in loss_fn, or in a hook of a parameter)"):
                step.backward(job.loss)
            break
        job.step(step)


def test_a_node_of_the_graph_that_the_script_holds(init):
    job = Job(init())
    node = job.model.weight.expand_as(job.model.weight).grad_fn.next_functions[0][0]
    with _step_error("the script holds the node of the graph that accumulates the gradient of Linear.weight"):
        job.train()
    del node


def test_a_node_that_the_script_only_looked_at_is_fine(init):
    job = Job(init())
    assert job.model.weight.expand_as(job.model.weight).grad_fn.next_functions[0][0].variable is job.model.weight
    job.train()


def _draw(loss):
    """As torchviz: a function that calls itself is a cycle, and keeps the nodes it has seen until Python collects it."""
    seen = set()

    def visit(node):
        seen.add(node)
        for other, _ in node.next_functions:
            if other is not None:
                visit(other)

    visit(loss.grad_fn)


def test_a_drawing_of_the_graph_is_fine(init):
    job = Job(init())
    gc.collect()
    gc.disable()
    try:
        _draw(job.model(torch.ones(2, 4)).sum())
        job.train()
    finally:
        gc.enable()


@pytest.mark.parametrize("micro_batch", [None, 4])
def test_a_gradient_that_loss_fn_sets_on_one_device(init, micro_batch):
    job = Job(init(**({} if micro_batch is None else {"micro_batch": micro_batch})))

    def loss_fn(batch):
        job.model.bias.grad = torch.ones_like(job.model.bias)
        return job.loss(batch)

    for index, step in enumerate(job.loader):
        if index == 4:  # not before steps go in a straight line
            with _step_error("loss_fn set or changed .grad of bias"):
                step.backward(loss_fn)
            assert job.model.bias.grad is None
            break
        job.step(step)


def _gradient_set_of_a_replica(folder):
    job = Job(evenload.init(project_dir=folder, strategy="dp"))
    weight = job.model.weight

    def loss_fn(batch):
        weight.grad = torch.ones_like(weight)
        return job.loss(batch)

    for step in job.loader:
        try:
            step.backward(loss_fn)
        except StepError as error:
            return str(error)
    return "no error"


def test_a_gradient_that_loss_fn_sets_under_dp(tmp_path):
    (error,) = run_split(_gradient_set_of_a_replica, 2, "dp", str(tmp_path))
    assert error.startswith("loss_fn set or changed .grad of weight")


def _master_weights(folder):
    walks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "covers", lambda self, param: walks.append(param))
        job = Job(evenload.init(project_dir=folder))
        masters = [nn.Parameter(p.detach().clone()) for p in job.model.parameters()]
        optimizer = torch.optim.SGD(masters, lr=0.01)
        for step in job.loader:
            step.backward(job.loss)
            for master, p in zip(masters, job.model.parameters(), strict=True):
                master.grad = p.grad
            optimizer.step()
            optimizer.zero_grad()
            job.model.zero_grad()
    return len(walks)


def test_copies_of_the_weights_are_known_without_a_walk_through_the_models(tmp_path):
    # of 300 copies, for each of them the parameters of all models: 120 ms in each step
    assert run_ranks(_master_weights, 2, str(tmp_path)) == [0, 0]


def test_an_optimizer_in_loss_fn(init):
    job = Job(init())

    def loss_fn(batch):
        job.optimizer.step()
        return job.loss(batch)

    with _step_error("Step it after step.backward(loss_fn) returned"):
        job.train(loss_fn)


def test_an_inner_loop_over_a_copy_is_fine(init):
    job = Job(init())

    def loss_fn(batch):
        inner = copy.deepcopy(job.model)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.01)
        functional.mse_loss(inner(batch[0]), batch[1]).backward()
        optimizer.step()
        return functional.mse_loss(job.model(batch[0]), inner(batch[0]).detach())

    assert len(job.train(loss_fn)) == 4


def test_the_scripts_own_scaler(init):
    job = Job(init())
    scaler = torch.amp.GradScaler("cpu")
    for step in job.loader:
        with _step_error('set evenload.init(precision="fp16") and remove the scaler'):
            step.backward(lambda batch: scaler.scale(job.loss(batch)))
        break


def test_the_scripts_own_scaler_that_was_used_before(init):
    job = Job(init())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for step in job.loader:
        step.backward(lambda batch: scaler.scale(job.loss(batch)))
        with _step_error("the script's own torch.amp.GradScaler scaled this step's loss or gradients"):
            scaler.step(job.optimizer)
        break


def test_a_scaler_that_is_switched_off_is_fine(init):
    job = Job(init())
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in job.loader:
        step.backward(lambda batch: scaler.scale(job.loss(batch)))
        scaler.step(job.optimizer)
        scaler.update()
        job.optimizer.zero_grad()


def test_an_optimizer_of_the_head_alone(init):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    job = Job(init(), model=model)
    job.optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    with _step_error(
        "2 parameters have gradients from the last step that no optimizer has used (the first is Sequential.0.weight)"
    ):
        job.train()
    model[0].requires_grad_(False)
    model.zero_grad()
    job.train()


def test_gradients_of_the_body_that_are_removed_are_fine(init):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    job = Job(init(), model=model)
    job.optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    for step in job.loader:
        step.backward(job.loss)
        job.optimizer.step()
        model.zero_grad()


def test_an_optimizer_of_a_copy(init):
    job = Job(init())
    job.optimizer = torch.optim.SGD(copy.deepcopy(job.model).parameters(), lr=0.01)
    with _step_error("SGD changes nothing: none of its 2 parameters is in a prepared model, and none has a gradient"):
        job.train()


def test_an_optimizer_of_what_is_frozen_for_now_is_fine(init):
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
    job = Job(init(), model=model)
    frozen = torch.optim.SGD(model[0].parameters(), lr=0.01)
    for step in job.loader:
        step.backward(job.loss)
        frozen.step()
        job.update()


def test_nothing_to_train(init):
    job = Job(init(), model=nn.Linear(4, 1).requires_grad_(False))
    with _step_error("no prepared model has a trainable parameter (Linear): all are frozen"):
        job.train()


def _normed():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class _Distilled(Job):
    """A model that learns from a frozen teacher with BatchNorm."""

    def __init__(self, run, prepared, training=True):
        torch.manual_seed(0)
        self.teacher = _normed().requires_grad_(False).train(training)
        if prepared:
            run.prepare(self.teacher)
        super().__init__(run, model=_normed())

    def loss(self, batch):
        with torch.no_grad():
            target = self.teacher(batch[0])
        return functional.mse_loss(self.model(batch[0]), target)


def _teacher_not_prepared(run):
    _Distilled(run, prepared=False).train()


def _teacher_not_prepared_at_eval(run):
    return len(_Distilled(run, prepared=False, training=False).train())


def _teacher_prepared(run):
    job = _Distilled(run, prepared=True)
    job.train()
    return job.teacher[1].running_mean.tolist()


def test_batch_norm_of_a_model_that_is_not_prepared(tmp_path):
    for line in told_by_ranks(_teacher_not_prepared, tmp_path):
        assert (
            "StepError: loss_fn runs Sequential.1 in training mode, and its model was not given to run.prepare" in line
        )
        assert "a frozen one may be prepared" in line


def test_batch_norm_that_needs_no_prepare(tmp_path):
    assert told_by_ranks(_teacher_not_prepared_at_eval, tmp_path) == [4, 4]
    assert told_by_ranks(_teacher_not_prepared, tmp_path / "local", batch_norm="local") == [None, None]
    first, second = told_by_ranks(_teacher_prepared, tmp_path / "prepared")
    assert first == second and any(first)


def test_batch_norm_of_a_model_that_is_not_prepared_under_dp(tmp_path):
    settings = {"strategy": "dp"}
    (line,) = run_split(jobs._tell, 2, "dp", _teacher_not_prepared, str(tmp_path / "run"), settings)
    assert "loss_fn runs Sequential.1 in training mode, and its model was not given to run.prepare" in line


def _frozen_differently(run):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 1))
    job = Job(run, model=model)
    job.train()
    model[run.rank].requires_grad_(False)
    job.train()


def test_other_parameters_frozen_on_other_ranks(tmp_path):
    for line in told_by_ranks(_frozen_differently, tmp_path):
        assert "DesyncError: the ranks train different parameters in step 4" in line


def _other_optimizers(run):
    job = Job(run)
    if run.rank:
        job.optimizer = torch.optim.Adam(job.model.parameters(), lr=0.01)
    for _ in range(4):
        job.train()


def test_other_optimizers_on_other_ranks(tmp_path):
    for line in told_by_ranks(_other_optimizers, tmp_path):
        assert (
            "DivergenceError" in line and "a different optimizer, learning rate or optimizer state on one rank" in line
        )


def _overlapping(run):
    """A model prepared twice, a part of it beside it, and parameters that two models share."""
    torch.manual_seed(0)
    body, head = nn.Linear(4, 4), nn.Linear(4, 1)
    model = nn.Sequential(body, head)
    other = nn.Sequential(body, nn.Linear(4, 1))
    run.prepare(head, model)
    run.prepare(model)
    run.prepare(other)
    job = Job(run, model=model)
    optimizer = torch.optim.SGD([*model.parameters(), *other[1].parameters()], lr=0.01)
    for step in job.loader:
        step.backward(lambda batch: job.loss(batch) + functional.mse_loss(other(batch[0]), -batch[1]))
        optimizer.step()
        optimizer.zero_grad()
    return nn.utils.parameters_to_vector([*model.parameters(), *other[1].parameters()]).double().tolist()


def test_models_that_overlap_are_fine(tmp_path, init):
    alone = _overlapping(init())
    assert told_by_ranks(_overlapping, tmp_path / "two") == [pytest.approx(alone, rel=1e-5)] * 2


def test_a_module_without_anything_to_prepare(init):
    with pytest.raises(ConfigError, match="GELU has no parameters, no buffers and no BatchNorm: there is nothing"):
        init().prepare(nn.GELU())


class _Copied(Job):
    """A model that learns from a copy of itself, on ranks that seed by their number, as scripts for DDP do."""

    def __init__(self, run, prepared=False):
        torch.manual_seed(run.rank)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.teacher = copy.deepcopy(model).requires_grad_(False)
        if prepared:
            run.prepare(self.teacher)
        super().__init__(run, model=model)

    def loss(self, batch):
        return functional.mse_loss(self.model(batch[0]), self.teacher(batch[0]) + batch[1])


def _teacher_of_each_rank(run):
    _Copied(run).train()


def _teacher_of_rank_0(run):
    job = _Copied(run, prepared=True)
    return [*job.train(), *job.teacher[1].weight.flatten().tolist()]


def test_a_frozen_model_that_differs_between_ranks(tmp_path):
    for line in told_by_ranks(_teacher_of_each_rank, tmp_path / "apart"):
        assert (
            "DesyncError: loss_fn uses Sequential, which was not given to run.prepare, and its parameters differ"
            in line
        )
    first, second = told_by_ranks(_teacher_of_rank_0, tmp_path / "prepared")
    assert first == second


class _Compiled(_Copied):
    def __init__(self, run):
        super().__init__(run)
        self.teacher = torch.compile(self.teacher, backend="eager")


def _compiled_teacher_of_each_rank(run):
    _Compiled(run).train()


def _graphs_of_a_compiled_teacher(run):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    job = _Compiled(run)
    for p in job.teacher.parameters():
        p.zero_()
    job.train()
    return counters["stats"]["unique_graphs"]


def test_a_compiled_frozen_model_is_compared_and_compiled_once(tmp_path):
    for line in told_by_ranks(_compiled_teacher_of_each_rank, tmp_path / "apart"):
        assert "DesyncError: loss_fn uses OptimizedModule, which was not given to run.prepare" in line
    assert told_by_ranks(_graphs_of_a_compiled_teacher, tmp_path / "same", balance=(8, 8)) == [1, 1]


def _tensor_by_hand(run):
    job = Job(run)
    factor = torch.ones(1, requires_grad=True)
    for step in job.loader:
        job.step(step, lambda batch: functional.mse_loss(job.model(batch[0]) * factor, batch[1]))
        with torch.no_grad():
            factor.sub_(0.01 * factor.grad)
        factor.grad = None


def test_a_tensor_that_is_trained_by_hand(tmp_path):
    for line in told_by_ranks(_tensor_by_hand, tmp_path):
        assert "StepError: a tensor of shape (1,) that is in no prepared model received a gradient in loss_fn" in line


def _features_that_nobody_froze(run):
    """Gradients of a feature extractor that are never used: wasteful, and right."""
    torch.manual_seed(0)
    features = nn.Linear(4, 4)
    job = Job(run, model=nn.Linear(4, 4))
    return job.train(lambda batch: functional.mse_loss(features(job.model(batch[0])), features(batch[0])))


def test_features_that_nobody_froze_are_fine(tmp_path, init):
    alone = _features_that_nobody_froze(init())
    assert told_by_ranks(_features_that_nobody_froze, tmp_path / "two") == [pytest.approx(alone, rel=1e-5)] * 2


def _odd_tensors(folder: str) -> float:
    """As `torch.func` ensembles have it, a module on `meta` that is called; and a view that torch refuses to look at."""
    run = evenload.init(project_dir=folder, seed=0)
    weight = nn.Parameter(torch.ones(2))
    base = torch.ones(2)
    with torch.no_grad():
        view = base.view(-1)
    base.mul_(weight)
    with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
        _ = view.is_leaf
    model, loader = run.prepare(nn.Linear(4, 1), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    skeleton = nn.Linear(4, 1, device="meta")
    parameters = dict(model.named_parameters())
    losses = []
    for step in loader:
        losses.append(
            step.backward(lambda batch: torch.func.functional_call(skeleton, parameters, tuple(batch)).square().mean())
        )
        model.zero_grad()
    run.close()
    return float(losses[0])


def test_tensors_that_can_not_be_looked_at_are_left_alone(tmp_path):
    assert len(set(run_ranks(_odd_tensors, 2, str(tmp_path)))) == 1
