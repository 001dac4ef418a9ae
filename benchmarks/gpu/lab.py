"""One experiment in one process on one GPU: ``python -m benchmarks.gpu.lab solo --model gpt --precision bf16``.

Prints what it finds, and the figures that are judged as JSON in a last line. With ``--cpu`` it runs on the CPU, to try the
code. It reads the parts of a run (`run._context`): no user's script does that.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.gpu.experiments import PREFIX, Figures, figures_of
from benchmarks.gpu.models import GPT, SUBJECTS, Tokens, loss_of, resnet50
from evenload.hardware import free_port


class Lab:
    """The options of one experiment and what all of them share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.is_cuda = not options.cpu
        self.device = torch.device("cpu" if options.cpu else "cuda:0")
        self.subject = SUBJECTS[options.model]
        self.batch = options.batch or self.subject.batch
        self.folder = tempfile.mkdtemp(prefix="lab-")

    def sync(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.precision == "no":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def loader(self, batch: int | None = None) -> DataLoader[Any]:
        size, options = batch or self.batch, self.options
        return DataLoader(
            self.subject.data(size * 400),
            batch_size=size,
            shuffle=True,
            drop_last=True,
            num_workers=options.workers,
            pin_memory=options.pin,
        )

    def adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.is_cuda)

    def prepared(self, batch: int | None = None, **settings: Any) -> tuple[Any, nn.Module, Any, torch.optim.Optimizer]:
        import evenload

        torch.manual_seed(0)
        settings = {"project_dir": self.folder, "seed": 0, "precision": self.options.precision, **settings}
        run = evenload.init(log_every_s=600.0, **settings)
        model, loader = run.prepare(self.subject.build(), self.loader(batch))
        return run, model, loader, self.adamw(model)

    def timed_s(self, body: Callable[[], None], num: int) -> float:
        """Seconds of one call, a mean over `num`."""
        self.sync()
        began_s = time.perf_counter()
        for _ in range(num):
            body()
        self.sync()
        return (time.perf_counter() - began_s) / num


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def flat(tensors: Iterator[torch.Tensor] | list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


def visible(lab: Lab) -> Figures:
    """E1: the GPU that NVML shows for each form of CUDA_VISIBLE_DEVICES."""
    from evenload.hardware import gpus

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if lab.is_cuda else "GPU-none"
    forms: list[str | None] = [None, "0", uuid, uuid[:12], "", "-1", "0,0", "7"]
    seen = [[gpu.name for gpu in gpus({} if form is None else {"CUDA_VISIBLE_DEVICES": form})] for form in forms]
    for form, names in zip(forms, seen, strict=True):
        print(f"CUDA_VISIBLE_DEVICES={form!r}: {names}")
    name = torch.cuda.get_device_name(0) if lab.is_cuda else ""
    return {"same": all(names[:1] == [name] for names in seen[:4]), "none": not any(seen[4:])}


def solo(lab: Lab) -> Figures:
    """E3: Evenload on one device against the plain loop, in alternating blocks."""
    options = lab.options
    run, model, loader, optimizer = lab.prepared()
    steps = endless(loader)
    plain = lab.subject.build().to(lab.device)
    own, batches = lab.adamw(plain), endless(lab.loader())

    def ours() -> None:
        next(steps).backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    def direct(reads_loss: bool) -> None:
        batch = [tensor.to(lab.device, non_blocking=True) for tensor in next(batches)]
        with lab.cast():
            loss = loss_of(plain, batch)
        loss.backward()
        own.step()
        own.zero_grad()
        if reads_loss:
            loss.item()

    arms = {"evenload": ours, "plain": lambda: direct(False), "plain + item()": lambda: direct(True)}
    took: dict[str, list[float]] = {name: [] for name in arms}
    clock, loop = run._context.clock, run._context.loop
    for number in range(options.rounds + 1):
        for name in [*list(arms)[number % 3 :], *list(arms)[: number % 3]]:
            step, segment = loop.step, clock.switch("other")
            if name != "evenload":
                loop.step = None  # the plain optimizer is no part of the run's step
            seconds = lab.timed_s(arms[name], options.steps)
            if name != "evenload":
                loop.step = step
            clock.switch("other" if name == "evenload" else segment)
            if number:
                took[name].append(seconds)
    base_s = median(took["plain"])
    for name, times in took.items():
        print(f"{name:15s} {median(times) * 1e3:8.3f} ms/step, {median(times) / base_s:.4f} of plain")
    return {"of_plain": median(took["evenload"]) / base_s, "step_s": median(took["evenload"])}


def syncs(lab: Lab) -> Figures:
    """E4: host synchronisations in a step by place, kernels, and the GPU's idle time."""
    _, model, loader, optimizer = lab.prepared()
    steps, is_text = endless(loader), lab.options.model.startswith("gpt")

    def loss_fn(batch: Any) -> Any:
        loss = loss_of(model, batch)
        return (loss, (batch[1] >= 0).sum()) if is_text else loss

    def one() -> None:
        next(steps).backward(loss_fn)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(6):
        one()
    if not lab.is_cuda:
        return {}
    found: dict[str, int] = {}

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "called a synchronizing" not in str(message):  # of the mode itself, which is a prototype
            return
        frames = [frame for frame in traceback.extract_stack() if "evenload" in frame.filename]
        place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else f"{Path(filename).name}:{lineno}"
        found[place] = found.get(place, 0) + 1

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    one()
    torch.cuda.set_sync_debug_mode("default")
    print("synchronisations in a step (waits for events are not among them):", found)
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(5):
            one()
        lab.sync()
    is_kernel = torch.autograd.DeviceType.CUDA
    kernels = [
        e for e in profiled.events() if e.device_type == is_kernel and not getattr(e, "is_user_annotation", False)
    ]
    spans = sorted((event.time_range.start, event.time_range.end) for event in kernels)
    busy_us, end_us, gaps_us = 0.0, spans[0][0], [0.0]
    for start, stop in spans:
        if start > end_us:
            gaps_us.append(start - end_us)
        busy_us += max(0.0, stop - max(start, end_us))
        end_us = max(end_us, stop)
    share = busy_us / (spans[-1][1] - spans[0][0])
    print(f"{len(kernels) / 5:.0f} kernels a step, GPU busy {share:.3f}, largest gap {max(gaps_us):.0f} us")
    return {"num_syncs": sum(found.values()), "places": found, "gap_s": max(gaps_us) / 1e6, "gpu_busy": share}


def clock(lab: Lab) -> Figures:
    """E5: a rank's own seconds against the device's, beside a host that is fast, slow, or far ahead."""
    from evenload.training.comm.clock import StepClock

    if not lab.is_cuda:
        return {}
    x = torch.randn(8192, 8192, device=lab.device)

    def work(num: int) -> None:
        for _ in range(num):
            torch.mm(x, x)

    def truth_s(num: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        lab.sync()
        start.record()
        work(num)
        end.record()
        lab.sync()
        return start.elapsed_time(end) / 1e3

    work(5)
    true_s = median(truth_s(20) for _ in range(3))
    own = StepClock(lab.device)
    own.take()
    for name, num in (("compute", 20), ("optimizer", 10), ("data", 0), ("compute", 20)):
        own.switch(name)
        work(num)
        if name == "data":
            time.sleep(0.05)
    taken = own.take()
    errors = [abs(taken["compute"] / (2 * true_s) - 1), abs(taken["optimizer"] / (true_s / 2) - 1)]
    began_s = time.perf_counter()
    for _ in range(1000):
        own.switch("comm")
        own.switch("compute")
    switch_s = (time.perf_counter() - began_s) / 2000
    print(
        f"compute {taken['compute']:.5f} s of {2 * true_s:.5f}, optimizer {taken['optimizer']:.5f} s of {true_s / 2:.5f}"
    )
    print(f"a switch takes {switch_s * 1e6:.1f} us of the host")
    return {"error": max(errors), "switch_s": switch_s}


def bn(lab: Lab) -> Figures:
    """E6: BatchNorm over two ranks (the second is emulated, nothing is sent) against torch's own kernels."""
    from evenload.training.comm.clock import StepClock
    from evenload.training.compute import batchnorm

    class TwoRanks:
        idle, in_use, world_size = False, True, 2

        def __init__(self) -> None:
            self.clock = StepClock(lab.device)

        def gather(self, own: torch.Tensor) -> torch.Tensor:
            with self.clock.segment("comm"):
                return torch.stack([own, own])

        def sum(self, own: torch.Tensor) -> torch.Tensor:
            with self.clock.segment("comm"):
                return own.mul_(2)

    batch, size = (lab.options.batch or 64, 224) if lab.is_cuda else (2, 32)
    x = torch.randn(batch, 3, size, size, device=lab.device)
    y = torch.randint(0, 10, (batch,), device=lab.device)
    ranks = TwoRanks()

    def step_s(is_global: bool, memory_format: torch.memory_format) -> float:
        torch.manual_seed(0)
        model = resnet50(64 if lab.is_cuda else 4).to(lab.device, memory_format=memory_format)
        images = x.contiguous(memory_format=memory_format)
        if is_global:
            batchnorm.convert(model)

        def one() -> None:
            with lab.cast():
                loss = F.cross_entropy(model(images), y)
            loss.backward()
            model.zero_grad()

        times = []
        for _ in range(12 if lab.is_cuda else 4):
            with batchnorm.Active(ranks) if is_global else contextlib.nullcontext():  # type: ignore[arg-type]
                times.append(lab.timed_s(one, 1))
            ranks.clock.take()
        return median(times[2:])

    factors = {}
    for name, memory_format in (("contiguous", torch.contiguous_format), ("channels_last", torch.channels_last)):
        own_s, global_s = step_s(False, memory_format), step_s(True, memory_format)
        factors[name] = global_s / own_s
        print(f"{name}: torch {own_s * 1e3:.1f} ms, over ranks {global_s * 1e3:.1f} ms, factor {factors[name]:.2f}")
    return {"factor": max(factors.values()), "factors": factors}


def feed(lab: Lab) -> Figures:
    """E7: seconds of a step whose samples are read and copied to the GPU."""
    _, model, loader, optimizer = lab.prepared()
    steps = endless(loader)

    def one() -> None:
        next(steps).backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        one()
    times = [lab.timed_s(one, lab.options.steps) for _ in range(3)]
    print(f"{median(times) * 1e3:.2f} ms/step with {lab.options.workers} workers, pin_memory={lab.options.pin}")
    return {"step_s": median(times)}


def shapes(lab: Lab) -> Figures:
    """E10: what new micro-batch sizes cost: cudnn.benchmark, the allocator, kernels that load late."""
    sizes = [64, 64, 64, 61, 61, 66, 66, 58, 58, 64, 61, 66, 70, 70, 53, 53] if lab.is_cuda else [4, 4, 5]
    new = []
    for is_benchmark in (False, True):
        gc.collect()
        if lab.is_cuda:
            torch.cuda.empty_cache()
        torch.backends.cudnn.benchmark = is_benchmark
        torch.manual_seed(0)
        model = SUBJECTS["rn50" if lab.is_cuda else "tiny"].build().to(lab.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        times: dict[int, list[float]] = {}
        for num in sizes:
            times.setdefault(num, []).append(_image_step_s(lab, model, optimizer, num))
        usual_s = median(t for of_size in times.values() for t in of_size[1:])
        new += [(of_size[0] - usual_s) / usual_s for of_size in list(times.values())[1:]]
        print(f"cudnn.benchmark={is_benchmark}: " + ", ".join(f"{n}: {ts[0] * 1e3:.0f} ms" for n, ts in times.items()))
    if not lab.is_cuda:
        return {}
    reserved = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
    print(f"a new size costs up to {max(new):.1f} steps; reserved {reserved:.2f} of the peak")
    return {"new_size_steps": max(new), "reserved_of_peak": reserved}


def _image_step_s(lab: Lab, model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> float:
    pixels = 224 if lab.is_cuda else 16
    x = torch.randn(num, 3, pixels, pixels, device=lab.device)
    y = torch.randint(0, 10, (num,), device=lab.device)

    def one() -> None:
        with lab.cast():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return lab.timed_s(one, 1)


def oom(lab: Lab) -> Figures:
    """E9: real out of memory: K rises, the memory is free again, the run goes on."""
    if lab.is_cuda:
        large = torch.cuda.get_device_properties(0).total_memory > 60e9
        torch.cuda.set_per_process_memory_fraction(0.10 if large else 0.3)
    _, model, loader, optimizer = lab.prepared(batch=512 if lab.is_cuda else 16)
    counts, growth = [], []
    for step in loader:
        before = torch.cuda.memory_allocated() if lab.is_cuda else 0
        step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        after = torch.cuda.memory_allocated() if lab.is_cuda else 0
        counts.append(step.batch.plan.num_micro)
        growth.append((after - before) / 2**20)
        print(
            f"step {step.index}: K {counts[-1]}, allocated {before / 2**30:.2f} GiB before, {after / 2**30:.2f} after"
        )
        if step.index == 4:
            break
    return {"num_micro": counts, "growth_mib": growth}


def nccl1(lab: Lab) -> Figures:
    """E8: the NCCL path with a world of one: an adopted process group makes all groups for real."""
    from evenload.training.comm.groups import Groups
    from evenload.training.parallel import ddp
    from evenload.training.parallel.reducer import BucketReducer

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    if lab.is_cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if lab.is_cuda else "gloo")

    made: list[Groups] = []

    def group_of_one(groups: Groups, ranks: tuple[int, ...]) -> Any:
        made.append(groups)
        return dist.new_group(list(ranks), backend=groups._inner.backend_of(ranks))

    class InBuckets(BucketReducer):
        def __init__(self, models: Any, grad_norms: Any, keep: Any) -> None:
            super().__init__(models, made[-1], grad_norms=grad_norms, keep=keep)

    # One rank has no groups to sum in, and no buckets; here it gets them, so that they travel.
    Groups._new_group = group_of_one  # type: ignore[method-assign]
    ddp.LocalReducer = InBuckets  # type: ignore[attr-defined]
    ddp.ReplicaStrategy.lone_call = lambda _: None  # type: ignore[method-assign]
    run, model, loader, optimizer = lab.prepared()
    gradients = run._context.groups.gradients
    assert gradients is not None
    print("gradients over", dist.get_backend(gradients))
    plain = lab.subject.build()
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    plain = plain.to(lab.device)
    own, worst, num_sums = lab.adamw(plain), 0.0, 0
    # A rank alone launches no kernels of NCCL, but torch counts its sums.
    backend = gradients._get_backend(lab.device)
    for step in loader:
        before = backend._get_sequence_number_for_group()
        got: list[Any] = []

        def loss_fn(batch: Any, got: list[Any] = got) -> torch.Tensor:
            got.append(batch)
            return loss_of(model, batch)

        step.backward(loss_fn)
        num_sums = backend._get_sequence_number_for_group() - before
        with lab.cast():
            loss = loss_of(plain, got[-1])
        loss.backward()
        ours, theirs = (flat([p.grad for p in m.parameters()]) for m in (model, plain))
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        for optimizer_ in (optimizer, own):
            optimizer_.step()
            optimizer_.zero_grad()
        if step.index == 6:
            break
    print(f"largest gradient difference to the plain model {worst:.2e}")
    print(f"{num_sums} sums in a step")
    return {"difference": worst, "num_sums": num_sums}


def rng(lab: Lab) -> Figures:
    """E12: dropout on the GPU across a checkpoint: 6 steps against 3 + resume + 3."""
    found = {}
    for name, stops in (("whole", (6,)), ("parts", (3, 6))):
        for stop in stops:
            words = [sys.executable, "-m", "benchmarks.gpu.lab", "part", "--stop", str(stop)]
            words += ["--folder", str(Path(lab.folder) / name), "--precision", lab.options.precision]
            done = subprocess.run([*words, *["--cpu"] * lab.options.cpu], capture_output=True, text=True)
            found[name] = figures_of(done.stdout) or {"error": done.stderr[-1500:]}
            print(name, stop, found[name])
    return {"is_equal": found["whole"] == found["parts"] and "error" not in found["whole"]}


def part(lab: Lab) -> Figures:
    """E12: a part of a run with dropout."""
    import evenload

    torch.manual_seed(0)
    width, depth, context = (256, 4, 128) if lab.is_cuda else (64, 1, 8)
    model: nn.Module = GPT(256, width, depth, context, drop=0.2)
    run = evenload.init(project_dir=lab.options.folder, seed=0, precision=lab.options.precision)
    model, loader = run.prepare(model, DataLoader(Tokens(16 * 6, context, 256), batch_size=16, shuffle=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.resume(model=model, optimizer=optimizer)
    drawn = 0.0
    for step in loader:
        step.backward(lambda batch: loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        drawn = torch.rand(1, device=run.device).item()
        run.checkpoint(every=3)
        if step.index + 1 == lab.options.stop:
            break
    weights = sum(float(weight.double().norm()) for weight in model.parameters())
    return {"weights": f"{weights:.12f}", "drawn": f"{drawn:.8f}"}


def graph(lab: Lab) -> Figures:
    """E11: torch.compile with and without CUDA graphs, with micro-batches of two sizes: gradients, times."""
    _, model, loader, optimizer = lab.prepared(micro_batch=lab.batch // 2 - 1)  # three micro-batches of unlike size
    worst, spread = 0.0, 0.0
    for mode in ("default", "reduce-overhead") if lab.is_cuda else ("default",):
        # On a CPU, a compiler of C++ would take longer than all else.
        options = {"mode": None if mode == "default" else mode} if lab.is_cuda else {"backend": "aot_eager"}
        net = torch.compile(model, **options)
        times = []
        for number, step in enumerate(loader):
            began_s = time.perf_counter()
            if number in (
                3,
                4,
                5,
            ):  # eager and compiled in one step: the second backward adds, so gradients are cleared
                step.backward(lambda batch: loss_of(model, batch))
                eager = flat([p.grad.clone() for p in model.parameters()])
                optimizer.zero_grad()
            step.backward(lambda batch, net=net: loss_of(net, batch))
            if number in (3, 4, 5):
                compiled = flat([p.grad for p in model.parameters()])
                worst = max(worst, float((eager - compiled).norm() / eager.norm()))
            optimizer.step()
            optimizer.zero_grad()
            lab.sync()
            if number >= 8:
                times.append(time.perf_counter() - began_s)
            if len(times) == lab.options.steps:
                break
        spread = max(spread, max(times) / median(times))
        print(
            f"{mode}: gradient against eager {worst:.2e}, {median(times) * 1e3:.2f} ms/step, longest {max(times):.4f} s"
        )
        torch._dynamo.reset()
    return {"difference": worst, "longest_step": spread}


EXPERIMENTS = {f.__name__: f for f in (visible, solo, syncs, clock, bn, feed, shapes, oom, nccl1, rng, part, graph)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lab", description=__doc__)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--model", default="gpt", choices=SUBJECTS)
    parser.add_argument("--precision", default="no")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pin", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--stop", type=int, default=6, help="of part: steps")
    parser.add_argument("--folder", default="", help="of part: the run's folder")
    options = parser.parse_args()
    figures = EXPERIMENTS[options.experiment](Lab(options))
    print(PREFIX + json.dumps(figures), flush=True)
    os._exit(0)  # a process that used gloo may die at exit


if __name__ == "__main__":
    main()
