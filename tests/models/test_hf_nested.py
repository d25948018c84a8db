"""Language models inside models with vision, under other names, and with experts in one tensor."""

import numpy as np
import pytest

from kvjax.base.errors import InputError
from kvjax.models.hf import load_hf
from kvjax.models.hf_config import config_from_hf
from tests.models import hf_fixtures
from tests.models.hf_cases import CASES
from tests.models.hf_fixtures import BAR, relative_error


def checked(fixture, folder, config, weights):
    model = load_hf(hf_fixtures.write(fixture._replace(config=config, weights=weights), folder))
    assert relative_error(model(fixture.tokens), fixture.logits) <= BAR


OTHERS = {"vision_tower.w": np.zeros(3, np.float32), "multi_modal_projector.w": np.zeros(2, np.float32)}


@pytest.mark.parametrize("name", ["ministral3", "mistral"])
def test_mistral_3_loads_its_language_model_of_either_kind(name, tmp_path):
    fixture = hf_fixtures.read(name)
    text = {key: x for key, x in fixture.config.items() if name != "mistral" or key != "model_type"}
    weights = {f"language_model.{key}": w for key, w in fixture.weights.items()} | OTHERS
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    checked(fixture, tmp_path, config, weights)


def joined_experts(weights):
    """Experts as transformers 5 and the published Qwen3.5 hold them: one tensor for gates and ups."""
    out = {name: w for name, w in weights.items() if ".experts." not in name}
    rooms = sorted({name.split(".experts.")[0] for name in weights if ".experts." in name})
    for room in rooms:
        count = sum(name.startswith(f"{room}.experts.") for name in weights) // 3
        one = [{p: weights[f"{room}.experts.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")}
               for e in range(count)]  # fmt: skip
        out[f"{room}.experts.gate_up_proj"] = np.stack([np.concatenate([x["gate"], x["up"]]) for x in one])
        out[f"{room}.experts.down_proj"] = np.stack([x["down"] for x in one])
    return out


def room_of(weights):
    return [name for name in weights if name.endswith("experts.gate_up_proj")]


@pytest.mark.rotating
def test_qwen_3_5_loads_experts_in_one_tensor_beside_vision_and_further_tokens(tmp_path):
    fixture = hf_fixtures.read("qwen3_5_moe_text")
    weights = joined_experts(fixture.weights)
    assert len(room_of(weights)) == 3 and len(weights) < len(fixture.weights)
    weights |= {n: np.zeros(2, np.float32) for n in ("model.visual.merger.norm.weight", "mtp.fc.weight")}
    config = {"model_type": "qwen3_5_moe", "text_config": fixture.config, "vision_config": {}}
    with pytest.warns(
        UserWarning, match=r"1 tensors predict further tokens \(mtp.fc.weight, \.\.\.\)"
    ) as notes:
        checked(fixture, tmp_path, config, weights)
    assert len(notes) == 1


@pytest.mark.rotating
def test_layers_above_the_last_that_predict_further_tokens_are_named(tmp_path):
    fixture = hf_fixtures.read("glm4_moe")
    above = {"model.layers.3.enorm.weight": np.zeros(2), "model.layers.3.eh_proj.weight": np.zeros((2, 2))}
    with pytest.warns(UserWarning, match=r"2 tensors predict further .* kvjax predicts the next token alone"):
        checked(fixture, tmp_path, fixture.config, fixture.weights | above)


def test_experts_in_one_tensor_that_are_too_few_are_named(tmp_path):
    fixture = hf_fixtures.read("qwen3_moe")
    weights = joined_experts(fixture.weights)
    checked(fixture, tmp_path / "all", fixture.config, weights)
    [room, *_] = room_of(weights)
    fewer = weights | {room: weights[room][:-1].copy()}
    with pytest.raises(InputError, match=r"2 missing: .*\.4\.gate_proj.weight, .*\.4\.up_proj"):
        load_hf(hf_fixtures.write(fixture._replace(weights=fewer), tmp_path / "fewer"))


@pytest.mark.parametrize("nested", [True, False])
def test_kimi_k2_is_deepseek_v3_under_other_names(nested, tmp_path):
    fixture = hf_fixtures.read("deepseek_v3")
    if not nested:
        checked(fixture, tmp_path, fixture.config | {"model_type": "kimi_k2"}, fixture.weights)
        return
    weights = {f"language_model.{name}": w for name, w in fixture.weights.items()}
    weights |= {"vision_tower.w": np.zeros(3, np.float32), "mm_projector.w": np.zeros(2, np.float32)}
    config = {"model_type": "kimi_k25", "text_config": fixture.config | {"model_type": "kimi_k2"}}
    checked(fixture, tmp_path, config, weights)


def test_minimax_m2_turns_as_many_channels_as_its_file_says():
    case = {n: x for n, x in CASES["minimax_m2"].items() if n != "partial_rotary_factor"}
    assert config_from_hf(case).rope.rotary_dim == 4
    assert config_from_hf({n: x for n, x in case.items() if n != "rotary_dim"}).rope.rotary_dim is None


def test_lfm2_has_two_thirds_of_the_width_that_its_file_gives():
    # LFM2-1.2B: 12288 in its file, by this name alone, and 8192 in its tensors.
    case = {name: x for name, x in CASES["lfm2"].items() if name != "intermediate_size"}
    sizes = {"block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}
    assert config_from_hf(case | sizes | {"block_ff_dim": 12288}).d_ff == 8192
    with pytest.raises(InputError, match="lacks intermediate_size, which lfm2 needs"):
        config_from_hf(case | sizes)


def test_glm_4_7_flash_with_dense_layers_among_sparse_ones_is_refused():
    with pytest.raises(InputError, match="mlp_layer_types .* expected dense layers, then sparse"):
        config_from_hf(CASES["glm4_moe_lite"] | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
