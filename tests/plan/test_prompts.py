"""What `kvjax plan` says of a prompt over several devices is what the programs send."""

from kvjax.mesh.on_mesh import OnMesh, as_mesh
from kvjax.mesh.rules import as_rules
from kvjax.models.config import Config
from kvjax.models.mixers.latent import Latent
from kvjax.models.mixers.recurrent import Retention
from kvjax.plan.prompts import in_words, traffic

ON = OnMesh(as_mesh("seq=4"), as_rules("sequence", ("seq",)))
SIZES = dict(vocab=8, d_model=64, heads=8, kv_heads=2, head_dim=8, d_ff=64)
TOKENS = 64


def test_bytes_are_those_of_the_keys_that_others_hold():
    full, few = (Config(**SIZES | dict(layers=2, windows=(w, None))) for w in (None, 17))
    each = TOKENS * 2 * 2 * 8 * 4
    assert [(m.layers, m.nbytes) for m in traffic(full, ON, 1, TOKENS)] == [((0, 1), each * 3 // 4)]
    # A window of 17 tokens reaches one device of 16 tokens back.
    assert [(m.layers, m.nbytes) for m in traffic(few, ON, 1, TOKENS)] == [
        ((0,), each // 4),
        ((1,), each * 3 // 4),
    ]
    assert traffic(full, ON, 1, TOKENS + 1) == []


def test_latents_go_as_they_lie_and_recurrent_layers_are_given_hidden_states():
    latent = Latent(rank=6, rope_dim=2, nope_dim=4, value_dim=4)
    config = Config(**SIZES | dict(layers=2, mixers=(latent, Retention(2, 8, 8))))
    sent = [m.nbytes for m in traffic(config, ON, 2, TOKENS, dtype="bfloat16")]
    assert sent == [2 * TOKENS * 8 * 2 * 3 // 4, 2 * TOKENS * 64 * 2 * 3 // 4]


def test_queries_visit_a_past_that_is_longer_than_they_and_their_outputs():
    config = Config(**SIZES | dict(layers=1))
    asked, one = TOKENS * 8 * (8 + 8) * 4, 2 * 2 * 8 * 4
    new = TOKENS * one * 3 // 4
    for past, sent in ((asked // one, asked * 3 // 4), (asked // one + 4, asked)):
        [layer] = traffic(config, ON, 1, TOKENS, past)
        assert layer.nbytes == new + sent
        assert ("queries" in layer.past) == (past > asked // one)
    [line] = in_words(config, ON, 1, TOKENS, 2**20, "float32")
    assert line.startswith("layer 0: keys and values") and "queries go" in line
