"""The heads format: what is written comes back, and what doesn't fit is refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from backends.heads.format import WEIGHTS_FILE, backbone_fingerprint, describe_heads, load_heads, save_heads
from backends.heads.module import HeadsError, MedusaHeads

HIDDEN, VOCAB = 32, 96


def random_heads(head_input="hidden+token", draft_ids=(1, 5, 40, 95)) -> MedusaHeads:
    ids = None if draft_ids is None else torch.tensor(draft_ids, dtype=torch.int32)
    heads = MedusaHeads(HIDDEN, 3, 24, head_input=head_input, draft_token_ids=ids)
    with torch.no_grad():
        for parameter in heads.parameters():
            # Values that bfloat16 holds exactly, so that a round trip has to be exact.
            parameter.copy_(torch.randn_like(parameter).to(torch.bfloat16))
    return heads


def saved(folder: Path, heads: MedusaHeads) -> Path:
    save_heads(heads, folder, config={"backbone": {"name": "tiny", "hidden_size": HIDDEN, "vocab_size": VOCAB}})
    return folder


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, **changes) -> None:
    path = folder / WEIGHTS_FILE
    tensors = load_file(path) | {name.replace("_weight", ".weight"): value for name, value in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize("head_input", ["hidden", "hidden+token"])
@pytest.mark.parametrize("draft_ids", [None, (1, 5, 40, 95)])
def test_round_trip_gives_the_same_guesses(tmp_path, head_input, draft_ids):
    heads = random_heads(head_input, draft_ids)
    loaded = load_heads(saved(tmp_path, heads), hidden_size=HIDDEN, vocab_size=VOCAB)
    hidden, pending = torch.randn(4, HIDDEN), torch.randn(4, HIDDEN)
    guessed = loaded.propose_hidden(hidden, pending)
    assert guessed.shape == (3, 4, HIDDEN)
    assert torch.equal(guessed, heads.propose_hidden(hidden, pending))
    assert loaded.head_input == head_input
    if draft_ids is None:
        assert loaded.draft_token_ids is None
    else:
        assert loaded.draft_token_ids is not None
        assert loaded.draft_token_ids.tolist() == list(draft_ids)


def test_stacked_heads_are_the_formula_head_by_head():
    heads = random_heads()
    x, e = torch.randn(2, HIDDEN), torch.randn(2, HIDDEN)

    def rms(v):
        return v / v.pow(2).mean(-1, keepdim=True).sqrt()

    for i, guessed in enumerate(heads.propose_hidden(x, e)):
        inner = torch.cat([rms(x), rms(e)], -1) @ heads.up.weight[i].T + heads.up.bias[i]
        expected = x + (inner * inner.sigmoid()) @ heads.down.weight[i].T
        torch.testing.assert_close(guessed, expected, rtol=1e-4, atol=1e-4)


def test_only_heads_with_token_input_see_the_pending_token():
    hidden, one, other = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN), torch.randn(1, HIDDEN)
    with_token, without = random_heads("hidden+token"), random_heads("hidden")
    assert not torch.equal(with_token.propose_hidden(hidden, one), with_token.propose_hidden(hidden, other))
    assert torch.equal(without.propose_hidden(hidden, one), without.propose_hidden(hidden, other))


def test_untrained_heads_guess_what_lm_head_says():
    heads = MedusaHeads(HIDDEN, 2, 8)
    hidden = torch.randn(3, HIDDEN)
    assert torch.equal(heads.propose_hidden(hidden, torch.randn(3, HIDDEN)), hidden.expand(2, 3, HIDDEN))


def test_number_of_heads_comes_from_the_tensors(tmp_path):
    change_config(saved(tmp_path, random_heads()), num_heads=9, inner_size=7)
    loaded = load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    assert (loaded.num_heads, loaded.inner_size) == (3, 24)
    assert describe_heads(tmp_path)["num_heads"] == 3


def test_refuses_another_backbone(tmp_path):
    saved(tmp_path, random_heads())
    with pytest.raises(HeadsError, match="hidden size 32, the backbone has 64"):
        load_heads(tmp_path, hidden_size=64, vocab_size=VOCAB)
    with pytest.raises(HeadsError, match="vocabulary of 96, the backbone has 100"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=100)


def test_refuses_another_format(tmp_path):
    with pytest.raises(HeadsError, match=r"config\.json can't be read"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    change_config(saved(tmp_path, random_heads()), format="medusa/2")
    with pytest.raises(HeadsError, match="format is 'medusa/2'; this version reads 'medusa-gateway/1'"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(HeadsError, match="is not JSON"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"up_weight": torch.zeros(3, 24, 40)}, "takes 40 inputs; expected 32 or 64"),
        ({"up_weight": torch.zeros(24, 64)}, "stacked over heads"),
        ({"down_weight": torch.zeros(2, HIDDEN, 24)}, "do not belong together"),
        ({"down_weight": None}, r"lacks down\.weight"),
        ({"draft_token_ids": torch.tensor([3, 2], dtype=torch.int32)}, "must ascend"),
        ({"draft_token_ids": torch.tensor([3, VOCAB], dtype=torch.int32)}, "must ascend within the vocabulary of 96"),
        ({"draft_token_ids": torch.tensor([3.0])}, "list of int32"),
    ],
)
def test_refuses_tensors_that_do_not_fit(tmp_path, changes, message):
    change_tensors(saved(tmp_path, random_heads()), **changes)
    with pytest.raises(HeadsError, match=message):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)


def test_refuses_more_heads_than_a_step_can_verify(tmp_path):
    shapes = {"up_weight": (17, 24, 2 * HIDDEN), "up_bias": (17, 24), "down_weight": (17, HIDDEN, 24)}
    saved(tmp_path, random_heads())
    change_tensors(
        tmp_path, **{"up.bias": torch.zeros(shapes.pop("up_bias"))}, **{k: torch.zeros(v) for k, v in shapes.items()}
    )
    with pytest.raises(HeadsError, match=f"{WEIGHTS_FILE}: 17 heads; from 1 to 16 can be used"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)
    with pytest.raises(HeadsError, match="20 heads; from 1 to 16"):
        MedusaHeads(HIDDEN, 20, 24)
    assert MedusaHeads(HIDDEN, 16, 24).num_heads == 16


def test_refuses_a_torn_weights_file(tmp_path):
    path = saved(tmp_path, random_heads()) / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(HeadsError, match="not a safetensors file"):
        load_heads(tmp_path, hidden_size=HIDDEN, vocab_size=VOCAB)


def test_fingerprint_is_of_the_weights_not_of_their_dtype():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    name = backbone_fingerprint(model)
    assert backbone_fingerprint(model.to(torch.bfloat16)) == name
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
    assert backbone_fingerprint(model) != name
