"""Rows cut after their first channels: of latents, the best approximation of lower rank."""

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.base.errors import InputError
from kvjax.store.first_channels import FirstChannels
from tests.methods.battery import MAIN, model


def test_cut_latents_give_the_closest_rows_of_their_rank(rng):
    w = rng.normal(size=(24, 8))
    u, s, v = np.linalg.svd(w, full_matrices=False)
    latents = jnp.asarray((u * np.sqrt(s))[None, None], jnp.float32)
    for share, rank in ((0.5, 4), (0.3, 2), (0.01, 1), (1.0, 8)):
        data = FirstChannels(share).encode(latents)
        assert {n: x.shape for n, x in data.items()} == {"first": (1, 1, 24, rank)}
        back = FirstChannels(share).decode(data, 8, jnp.float32)
        got = np.asarray(back[0, 0], np.float64) @ (np.sqrt(s)[:, None] * v)
        np.testing.assert_allclose(got, (u[:, :rank] * s[:rank]) @ v[:rank], atol=1e-5)


def test_shares_and_ranks_that_do_not_exist_are_refused():
    for share in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="a share of the channels"):
            FirstChannels(share)
    with pytest.raises(InputError, match="lower"):
        kvjax.method("zdc", budget=0.5, lower=0.0)
    with pytest.raises(InputError, match="rank=17 is more than the 16 channels of a group of 1 heads"):
        kvjax.prefill(model("4/2"), MAIN.first, method=kvjax.method("zdc", budget=0.5, rank=17))
