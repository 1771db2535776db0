"""Train the runs of one or several configs in their folders: build, lock, resume or begin, train to the end."""

import gc
import sys
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from splitveil.compute.compile import compiler_settings
from splitveil.compute.pick_device import pick_device
from splitveil.compute.process_group import process_group
from splitveil.config import Config
from splitveil.data.splits import Splits
from splitveil.registry import UserError
from splitveil.runs import Run, locked
from splitveil.training.build import build_parts, build_splits
from splitveil.training.checkpoint import mend_weights
from splitveil.training.loop import Training, check_training, train
from splitveil.training.teachers import find_teachers


def train_run(folder: Path, config: Config) -> tuple[Run, Splits, torch.device]:
    """Train, or go on training, the run in `folder`."""
    return train_runs({folder: config})[0]


def train_runs(configs: dict[Path, Config]) -> list[tuple[Run, Splits, torch.device]]:
    """Train runs side by side, a step of each in one captured graph where there is a GPU."""
    configs = {folder: Run.continued(folder, config) for folder, config in configs.items()}
    devices = {config.device for config in configs.values()}
    if len(devices) > 1:
        raise UserError(f"runs that are trained together must be on one device, not on {', '.join(sorted(devices))}")
    device = pick_device(devices.pop())
    compiled = any(config.train.compile for config in configs.values())
    with process_group(device) as (rank, world), compiler_settings(compiled, device), ExitStack() as locks:
        built = []
        for folder, config in configs.items():
            splits = build_splits(config)
            # Before the folder is made: a setting that is refused must not leave one behind.
            parts = build_parts(config, splits.task, device)
            check_training(parts, config.train, splits, world)
            taught = config.train.distillation.teachers and not finished(folder)
            teachers = find_teachers(config, splits, device, world) if taught else {}
            built.append((splits, parts, teachers))
        runs, trainings = [], []
        for (folder, config), (splits, parts, teachers) in zip(configs.items(), built):
            if rank == 0:
                locks.enter_context(locked(folder))
                run = Run.create(folder, config)
                run.begin_manifest()
                run.check_splits(splits.summary())
            if world > 1:
                dist.barrier()  # one process makes the folder, the others find it
            runs.append(Run.open(folder))
            if not runs[-1].finished():
                if rank == 0:
                    runs[-1].write_environment(device)
                trainings.append(Training(runs[-1], parts, splits, device, rank, world, teachers))
            elif rank == 0:
                mend_weights(runs[-1], parts, splits.task.kind)
        if trainings:
            train(trainings)
            # DistributedDataParallel's threads must end before the process group does, and a process's first training is
            # part of a reference cycle that only the collector frees.
            trainings.clear()
            if world > 1:
                gc.collect()
        if rank > 0:
            sys.exit(0)  # attacks and reports are the first process's work
    return [(run, splits, device) for run, (splits, *_) in zip(runs, built)]


def finished(folder: Path) -> bool:
    """True if there is a run in the folder with nothing left to train."""
    return (folder / "schema.json").exists() and Run.open(folder).finished()
