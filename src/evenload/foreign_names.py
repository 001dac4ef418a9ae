"""Names that other libraries use, and what takes their place here; for the messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

_BATCH = (
    "the DataLoader's batch_size is the global batch of one optimizer step, so it replaces gradient "
    "accumulation: multiply it by the number of accumulated batches"
)
_DEVICES = "name devices on the command line: evenload run -d 0,1 train.py (or -d cpu,cpu)"
_LOOP = "the loop, the epochs and the optimizer stay in your script"
_CLIP = "call torch.nn.utils.clip_grad_norm_(model.parameters(), ...) after step.backward, as in a plain script"
_PRECISION = 'write precision="bf16" or "fp16" (or "no")'
_NO_SYNC = "leave it out: step.backward sums the gradients of the whole global batch once"
_SAVE = "call run.checkpoint(every=...) at the end of the loop body; run.export(path) writes the weights alone"
_RESUME = "write run.resume(model=model, optimizer=optimizer, scheduler=scheduler) before the loop"
_BACKWARD = "write step.backward(loss_fn) in `for step in loader`, where loss_fn(batch) returns the loss"
_PREPARE = "write model, loader = run.prepare(model, loader)"
_UNWRAP = "leave it out: the model stays your own object and is never wrapped"
_MAIN = "write `if run.is_main:`"
_EPOCH = "leave it out: each epoch has its own order, keyed by seed and epoch"
_OPTIMIZER = "optimizers and schedulers stay your own and are not prepared; pass them to run.resume"
_INIT = "write run = evenload.init()"


def _by_name(*rows: tuple[str, str]) -> dict[str, str]:
    """Return the second part of each row for each word of its first part."""
    return {name: text for names, text in rows for name in names.split()}


SETTINGS_ELSEWHERE: Mapping[str, str] = _by_name(
    ("mixed_precision fp16 bf16 amp dtype autocast use_amp amp_dtype", _PRECISION),
    (
        "gradient_accumulation_steps accumulate_grad_batches grad_accum gradient_accumulation_plugin "
        "accumulation_steps accum_steps grad_accum_steps",
        _BATCH,
    ),
    (
        "batch_size batch global_batch global_batch_size train_batch_size per_device_train_batch_size",
        "set batch_size on the DataLoader: it is the global batch of one optimizer step",
    ),
    (
        "micro_batch_size train_micro_batch_size_per_gpu",
        'write micro_batch=..., the most samples that a rank computes at once (default "auto")',
    ),
    (
        "device devices gpus num_gpus gpu gpu_ids accelerator cpu use_cpu no_cuda multi_gpu device_placement num_processes "
        "nproc_per_node world_size rank local_rank nprocs n np",
        _DEVICES,
    ),
    ("num_nodes nnodes num_machines", "write evenload run --nodes 2 --host HOST train.py"),
    ("log_with logger tracker trackers report_to", 'write loggers="tensorboard" (or wandb, mlflow)'),
    (
        "project_config logging_dir log_dir output_dir save_dir checkpoint_dir default_root_dir run_dir "
        "folder dir path name run_name project_name root_dir logdir",
        'write project_dir="runs/name", the run folder',
    ),
    ("project", 'write logger_options={"wandb": {"project": ...}}, or project_dir="runs/name" for the run folder'),
    ("max_epochs epochs num_epochs max_steps num_train_epochs callbacks plugins", _LOOP),
    ("lr learning_rate optimizer scheduler weight_decay", _OPTIMIZER),
    ("gradient_clip_val gradient_clipping clip_grad_norm max_grad_norm", _CLIP),
    ("random_seed manual_seed seed_everything", "write seed=..."),
    (
        "sync_batchnorm sync_bn syncbn",
        'leave it out: BatchNorm takes its statistics over all ranks (batch_norm="global")',
    ),
    (
        "split_batches dispatch_batches even_batches dataloader_config use_seedable_sampler "
        "use_distributed_sampler step_scheduler_with_optimizer",
        "leave it out: the loader yields global batches, each sample once, and the scheduler stays your own",
    ),
    (
        "find_unused_parameters static_graph bucket_cap_mb kwargs_handlers broadcast_buffers gradient_as_bucket_view",
        "leave it out: unused parameters and buckets need no setting",
    ),
    (
        "deepspeed_plugin fsdp_plugin megatron_lm_plugin parallel mode distributed_backend",
        'write strategy="ddp" (or another strategy)',
    ),
    ("backend init_method process_group_backend", "leave it out: NCCL is used among GPUs, gloo with other ranks"),
    ("timeout ddp_timeout", "write timeout_s=..., in seconds"),
    ("log_every log_every_n_steps logging_steps log_interval", "write log_every_s=..., in seconds"),
    (
        "shares split ratios proportions weights speeds",
        'write balance="auto" (measured), "even", or one share for each rank',
    ),
    ("config config_file args", "give settings by name, or a TOML file by evenload run -c FILE"),
    ("resume resume_from_checkpoint ckpt_path resume_from", _RESUME),
    ("save_every checkpoint_every save_steps keep save_total_limit", _SAVE),
    ("workers num_dataloader_workers", "set num_workers on the DataLoader"),
)
"""Settings of Accelerate, Fabric, Lightning, DeepSpeed and DDP, by name."""

VALUES_ELSEWHERE: Mapping[str, str] = _by_name(
    ("bf16-mixed bf16-true bfloat16 torch.bfloat16", "write precision='bf16'"),
    ("16 16-mixed 16-true float16 half torch.float16 amp", "write precision='fp16', or 'bf16' where the GPU has it"),
    ("32 32-true fp32 float32 torch.float32", "leave it out for the model's own dtype"),
    ("ddp_spawn ddp_notebook ddp_find_unused_parameters_true mirrored multi_gpu", "write 'ddp'"),
    ("DP DataParallel data_parallel", "write 'dp'"),
    (
        "fsdp fsdp2 fully_shard zero zero1 zero2 zero3 deepspeed pipeline tensor",
        "states are not sharded over ranks yet; evenload.place splits a model too large for one device (docs/choosing.md)",
    ),
    ("sync", "leave it out: global takes the statistics over all ranks"),
    ("linear", "write 'adascale' or 'sqrt'"),
)
"""Values of settings in other libraries."""

RUN_ELSEWHERE: Mapping[str, str] = _by_name(
    ("backward manual_backward optimize", _BACKWARD),
    ("accumulate gradient_accumulation_steps sync_gradients gradient_state", _BATCH),
    ("no_sync no_backward_sync", _NO_SYNC),
    ("gather_for_metrics all_gather gather_object all_gather_object", "write run.gather(x)"),
    ("pad_across_processes", "leave it out: run.gather takes values of unequal length"),
    ("all_reduce sum mean reduce_mean allreduce", 'write run.reduce(x), or run.reduce(x, op="mean")'),
    ("wait_for_everyone synchronize wait sync", "write run.barrier()"),
    ("broadcast broadcast_object_list", "write run.gather(x)[0], or compute it alike on all ranks"),
    (
        "is_main_process is_local_main_process is_global_zero is_last_process main on_main_process "
        "on_local_main_process on_last_process rank_zero_only master is_master",
        _MAIN,
    ),
    ("process_index global_rank local_rank local_process_index node_rank", "write run.rank"),
    ("num_processes num_devices world size num_ranks n_gpus", "write run.world_size"),
    ("main_process_first local_main_process_first rank_zero_first", "write with run.main_first():"),
    ("unwrap_model module unwrap model", _UNWRAP),
    ("save_state save save_checkpoint save_model_state", _SAVE),
    (
        "save_model get_state_dict save_pretrained state_dict",
        "write run.export(path), or use model.state_dict() as it is",
    ),
    ("load_state load load_checkpoint load_state_dict restore load_raw register_for_checkpointing", _RESUME),
    ("clip_grad_norm_ clip_grad_value_ clip_gradients", _CLIP),
    (
        "autocast mixed_precision scaler precision unscale_gradients",
        'set init(precision="bf16"): step.backward then runs loss_fn under autocast and scales the loss',
    ),
    (
        "setup setup_module setup_model setup_dataloaders prepare_model prepare_data_loader init_module wrap "
        "prepare_dataloader train_dataloader loader dataloader",
        _PREPARE,
    ),
    ("setup_optimizers prepare_optimizer prepare_scheduler optimizer optimizers scheduler step zero_grad", _OPTIMIZER),
    (
        "init_trackers logger loggers trackers add_scalar writer",
        'set init(loggers="tensorboard"), and write run.log({"loss": loss})',
    ),
    ("get_tracker", 'write run.tracker("wandb")'),
    ("log_dict log_metrics log_scalar", 'write run.log({"loss": loss})'),
    ("end_training finish free_memory clear shutdown stop end teardown", "write run.close(), or let the script end"),
    ("skip_first_batches", "leave it out: run.resume restores the position in the data"),
    ("split_between_processes eval_batches evaluate validate eval iterate", "write for batch in run.batches(loader):"),
    ("set_trigger check_trigger should_stop", "write if run.any(flag): break"),
    ("launch spawn", 'write evenload run train.py, or evenload.spawn(train, devices="cpu:2")'),
    (
        "fit train test predict epochs current_epoch max_epochs",
        "there is no trainer: the loop, the epochs and the optimizer stay in your script",
    ),
    ("to to_device cuda", "leave it out: run.prepare moves the model, and loss_fn receives batches on run.device"),
    ("seed_everything seed set_seed", "set init(seed=...)"),
    ("max min", 'write run.reduce(x, op="max") or op="min"'),
    ("all", "write not run.any(not flag)"),
    ("project_dir folder dir path config", "the run folder is what init(project_dir=...) was given"),
)
"""Methods and attributes of Accelerate's Accelerator, of Fabric and of trainers, by name."""

STEP_ELSEWHERE: Mapping[str, str] = _by_name(
    (
        "batch data inputs x y labels samples to cuda keys items values size shape get pop unsqueeze view float",
        "the batch arrives in loss_fn, already on the device: step.backward(loss_fn), where loss_fn(batch) "
        "returns the loss",
    ),
    ("zero_grad step clip_grad_norm_", "call it on your own optimizer or model, as in a plain script"),
    ("loss item detach", "step.backward(loss_fn) returns the loss"),
    ("accumulate no_sync", _BATCH),
)
"""Attributes that a user of plain batches or of a trainer expects on a step."""

MODEL_ELSEWHERE: Mapping[str, str] = _by_name(
    ("module", "the model stays your own object and is never wrapped: leave .module out"),
    (
        "no_sync accumulate set_requires_gradient_sync require_backward_grad_sync set_is_last_backward",
        f"the model is never wrapped, and gradients are summed once in a step: leave it out. {_BATCH[0].upper()}{_BATCH[1:]}",
    ),
    ("join", "leave it out: every rank takes part in every step, whatever its share"),
    ("backward", _BACKWARD),
    ("step zero_grad_ optimizer_step", "write optimizer.step(); optimizer.zero_grad(), with your own optimizer"),
    ("clip_grad_norm_ clip_grad_value_ clip_gradients", _CLIP),
    ("save_checkpoint save save_weights", _SAVE),
    ("load_checkpoint load_weights load", _RESUME),
    (
        "fit compile_model train_on_batch train_batch evaluate predict trainer fit_generator",
        "there is no trainer: the loop, the epochs and the optimizer stay in your script",
    ),
    ("local_rank global_rank rank world_size device", "write run.rank, run.world_size, run.device"),
)
"""Attributes that DistributedDataParallel, FSDP, DeepSpeed's engine or Keras add to a model."""

OPTIMIZER_ELSEWHERE: Mapping[str, str] = _by_name(
    ("backward", _BACKWARD),
    ("synchronize skip_synchronize consolidate_state_dict", "leave it out: step.backward sums the gradients"),
    ("clip_master_grads clip_grad_norm clip_grad_norm_", _CLIP),
    ("optimizer", "leave .optimizer out: the optimizer stays your own object and is never wrapped"),
)
"""Attributes that other libraries add to an optimizer."""

LOADER_ELSEWHERE: Mapping[str, str] = _by_name(
    ("sampler batch_sampler set_epoch", _EPOCH),
    (
        "num_workers collate_fn pin_memory drop_last generator prefetch_factor",
        "read it from the DataLoader that run.prepare was given",
    ),
    ("skip state_dict load_state_dict", "leave it out: run.resume restores the position in the data"),
)
"""Attributes of a DataLoader, or of its replacements elsewhere."""

MODULE_ELSEWHERE: Mapping[str, str] = _by_name(
    ("Accelerator Fabric Trainer init_process_group initialize setup start PartialState", _INIT),
    (
        "prepare DistributedDataParallel DDP DataParallel FSDP fully_shard wrap",
        "write run = evenload.init(), then model, loader = run.prepare(model, loader)",
    ),
    (
        "launch notebook_launcher debug_launcher run multiprocessing",
        'write evenload.spawn(train, devices="cpu:2"), or evenload run train.py',
    ),
    ("backward step optimize", _BACKWARD),
    ("seed_everything set_seed manual_seed", "write evenload.init(seed=...)"),
    (
        "DataLoader DistributedSampler DistributedDataLoader",
        "use torch.utils.data.DataLoader, and pass it to run.prepare",
    ),
    (
        "log resume checkpoint export batches any reduce gather barrier close device rank world_size is_main "
        "print save load get_rank get_world_size",
        "it belongs to the run: run = evenload.init(), then run.NAME",
    ),
)
"""Names of other packages, and names of the run looked for in the package."""

COMMANDS_ELSEWHERE: Mapping[str, str] = _by_name(
    ("launch train start exec python torchrun fit", "write: evenload run train.py"),
    ("help man usage", "write: evenload --help"),
    ("status squeue list jobs top", "write: evenload ps"),
    ("sbatch qsub enqueue", "write: evenload submit -- evenload run train.py"),
    ("scancel kill stop qdel", "write: evenload cancel JOB"),
    ("test env check info config", "write: evenload doctor"),
    ("report view tensorboard inspect", "write: evenload show RUN"),
    ("benchmark bench measure", "write: evenload demo"),
    ("version", "write: evenload --version"),
)
"""Commands of other tools, and the command here."""


def describe_unknown(name: str, known: Iterable[str], elsewhere: Mapping[str, str]) -> str:
    """Return what to write instead of an unknown name: the same in other words, or a similar name; empty if unknown."""
    if name in elsewhere:
        return elsewhere[name].replace("NAME", name)
    lower = {word.lower().replace("-", "_"): word for word in (*elsewhere, *known)}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), list(lower), n=1, cutoff=0.6)
    if not close:
        return ""
    word = lower[close[0]]
    return (
        elsewhere[word].replace("NAME", word) if word in elsewhere and word not in known else f"did you mean {word!r}?"
    )
