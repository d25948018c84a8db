"""Checkpoints of a run: Orbax writes them atomically while training continues."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.base.atomic_files import disk_says, in_short
from kvjax.base.errors import InputError
from kvjax.io.checkpoint import quiet_orbax


class Saver:
    """The checkpoints of one run's folder; the last two are kept."""

    def __init__(self, folder: Path):
        self.folder = folder / "checkpoints"
        # Threads of Orbax log the errors that `close` raises.
        self.quiet = contextlib.ExitStack()
        self.quiet.enter_context(quiet_orbax())
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self.manager = ocp.CheckpointManager(self.folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self.manager.latest_step()

    def save(self, step: int, state: Any, rest: dict[str, Any]) -> None:
        """Start to write a state and JSON data. Raises InputError if the disk fails."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), rest=ocp.args.JsonSave(rest))
        try:
            self.manager.save(step, args=args)
        except (OSError, ValueError) as error:
            raise self._refused(error) from error

    def load(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """Load the newest state, with the shardings and dtypes of `like`. Raises InputError if unreadable."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), rest=ocp.args.JsonRestore())
        try:
            found = self.manager.restore(self.latest, args=args)
            rest = found["rest"]
            if not isinstance(rest, dict) or not all(isinstance(part, dict) for part in rest.values()):
                raise ValueError("it does not say how far the texts were read")
        except Exception as error:  # Orbax raises various exceptions
            raise InputError(
                f"the checkpoint {self.folder / str(self.latest)} cannot be read ({in_short(error)}): remove "
                f"that folder {self._before}"
            ) from error
        return found["state"], rest

    def close(self) -> None:
        """Wait until everything is on disk. Raises InputError if the disk refuses."""
        try:
            self.manager.wait_until_finished()
            self.manager.close()
        except (OSError, ValueError) as error:
            raise self._refused(error) from error
        finally:
            self.quiet.close()

    @property
    def kept(self) -> str:
        """What an interrupted run can continue from, in words."""
        if self.latest is None:
            return "no checkpoint was written yet"
        return f"the last checkpoint stays, of step {self.latest}"

    @property
    def _before(self) -> str:
        """What a run can continue from if the newest checkpoint cannot be read."""
        older = [step for step in self.manager.all_steps() if step != self.latest]
        if not older:
            return "and all of the run, of which it is the only one, to start anew"
        return f"to go on from the one before, of step {max(older)}"

    def _refused(self, error: OSError | ValueError) -> InputError:
        if (cause := disk_says(error)) is None:
            raise error
        for cut in self.folder.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(cut, ignore_errors=True)
        return InputError(
            f"a checkpoint could not be written to {self.folder} ({cause}), {self.kept}: free some space, "
            "then go on with --resume"
        )
