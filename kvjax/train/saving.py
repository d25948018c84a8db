"""Checkpoints of a run: Orbax writes them while training goes on, whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from kvjax.checkpoint import disk_says, quiet_orbax
from kvjax.errors import InputError


class Saver:
    """The checkpoints of one run's folder; the last two are kept."""

    def __init__(self, folder: Path):
        self.folder = folder / "checkpoints"
        # Threads of Orbax log what `close` raises.
        self.quiet = contextlib.ExitStack()
        self.quiet.enter_context(quiet_orbax())
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
        self.manager = ocp.CheckpointManager(self.folder.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """The step behind the newest whole checkpoint."""
        return self.manager.latest_step()

    def save(self, step: int, state: Any, rest: dict[str, Any]) -> None:
        """Starts to write a state and what JSON takes beside it. Raises InputError where the disk refuses."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), rest=ocp.args.JsonSave(rest))
        try:
            self.manager.save(step, args=args)
        except (OSError, ValueError) as error:
            raise self._refused(error) from error

    def load(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """The newest state, in the places and dtypes of `like`. Raises InputError where it cannot be read."""
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target), rest=ocp.args.JsonRestore())
        try:
            found = self.manager.restore(self.latest, args=args)
        except (ValueError, OSError, KeyError) as error:
            where = self.folder / str(self.latest)
            raise InputError(
                f"the checkpoint {where} cannot be read ({str(error).splitlines()[0]}): remove that folder "
                "to go on from the one before"
            ) from error
        return found["state"], found["rest"]

    def close(self) -> None:
        """Waits until everything is on disk. Raises InputError where the disk refuses."""
        try:
            self.manager.wait_until_finished()
            self.manager.close()
        except (OSError, ValueError) as error:
            raise self._refused(error) from error
        finally:
            self.quiet.close()

    @property
    def kept(self) -> str:
        """What a run that ends here can go on from, in words."""
        if self.latest is None:
            return "no checkpoint was written yet"
        return f"the last checkpoint stays, of step {self.latest}"

    def _refused(self, error: OSError | ValueError) -> InputError:
        if (cause := disk_says(error)) is None:
            raise error
        return InputError(
            f"a checkpoint could not be written to {self.folder} ({cause}), {self.kept}: free some space, "
            "then go on with --resume"
        )
