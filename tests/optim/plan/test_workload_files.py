"""Workloads by name and from files; parameters and FLOPs against what is published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trine.optim.plan import LatentAttention, Workload
from trine.optim.plan._tables import packaged
from trine.optim.plan.workload_files import model_names, workload_of
from trine.record.errors import TrineError


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the published weights hold (safetensors' metadata on the Hub), but for GPT-3, whose paper rounds.
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("bloom-176b", 176_247_271_424),
        ("gpt-neox-20b", 20_554_567_680),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_630_071_296),
        ("qwen2_5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("deepseek-v2", 235_741_434_880),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
    ],
)
def test_known_models_have_their_published_parameters(name: str, parameters: int) -> None:
    assert workload_of(name).parameters == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("deepseek-v3", 671e9, 37e9),
        ("deepseek-v2", 236e9, 21e9),
        ("kimi-k2", 1.0264e12, 32.6e9),
        ("qwen3-235b-a22b", 235e9, 22e9),
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("gpt3-175b", 175e9, 175e9),
    ],
)
def test_active_parameters_are_those_that_papers_name(name: str, total: float, active: float) -> None:
    workload = workload_of(name)
    assert workload.parameters == pytest.approx(total, rel=0.005)
    embedding = 0 if workload.tied_embeddings else workload.embedding_parameters
    assert workload.active_parameters + embedding == pytest.approx(active, rel=0.02)


def test_every_known_model_says_where_it_is_published() -> None:
    for name in model_names():
        assert len(str(packaged("models.toml")[name]["source"])) > 20
        assert workload_of(name.upper()).name == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3-8b"),
        ("meta-llama/Llama-3.1-405B-Instruct", "llama3-405b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen2.5-7B", "qwen2_5-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("GPT OSS 120B", "gpt-oss-120b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
    ],
)
def test_names_as_the_hub_spells_them(text: str, name: str) -> None:
    assert workload_of(text).name == name


def test_a_file_has_the_fields_of_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nlayers = 4\nhidden = 64\nheads = 4\nffn = 256\nvocab = 100\nsequence = 32\nbias = false\n'
        "[latent]\nkv_rank = 16\nrope_head_size = 8\nvalue_head_size = 16\n"
    )
    workload = workload_of(path)
    assert (workload.name, workload.layers, workload.bias) == ("mine", 4, False)
    assert workload.latent == LatentAttention(16, 0, 8, 16)
    assert workload_of(path, sequence=64).sequence == 64


def test_a_file_may_start_from_a_known_model(tmp_path: Path) -> None:
    path = tmp_path / "wider.toml"
    path.write_text('like = "llama3-8b"\nhidden = 8192\nheads = 64\nffn = 28672\nlayers = 80\nkv_heads = 8\n')
    assert workload_of(path).with_changes(name="llama3-70b") == workload_of("llama3-70b")
    path.write_text('like = "mistral-7b"\nlayers = 8\n')
    assert workload_of(path).window_layers == 8  # all of them, as before
    path.write_text('like = "llama3-8b"\nheads = 16\n')  # a new number of heads has new sizes
    assert (workload_of(path).kv_heads, workload_of(path).head_size) == (16, 256)


def test_a_folder_or_a_config_of_hugging_face(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
    }
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    workload = workload_of(folder)
    assert (workload.name, workload.sequence) == ("tiny-llama", 64)
    assert workload == workload_of(folder / "config.json")
    assert workload_of(str(folder), sequence=16).sequence == 16


SHORT = "layers = 4\nhidden = 64\nheads = 4\nvocab = 100\nsequence = 32\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layers = ", "is not TOML"),
        (SHORT, "has no ffn"),
        ("layers = 4\n", "has no hidden"),
        (SHORT + "ffn = 256\nexperts = 0\nexperts_per_token = 2\n", "experts_per_token 2 is of experts, and"),
        (SHORT + "expert_ffn = 1024\n", "model.toml: expert_ffn 1024 is of experts, and there are none"),
        ('like = "llama3-8b"\nwindow_layers = -5\n', "window_layers must not be negative, not -5"),
        ('like = "llama3-8b"\nwindow_layers = 5\n', "window_layers 5 see a window, and there is none"),
        ('like = "llama3-8b"\nrotary_base = 0\n', "rotary_base must be above 0, such as 10000"),
        ('like = "llama3-8b"\nsequence_is_most = true\n', "no key 'sequence_is_most'"),
        ('like = "llama3-8b"\nsource = 3\n', "source must be text, not 3"),
        ('like = "llama3-8b"\naliases = 3\n', "aliases must be a list of names, not 3"),
        ('like = "llama3-8b"\nname = ""\n', "name must be a name of one line, not ''"),
        ('like = "llama3-8b"\nname = "x\\ny"\n', "name must be a name of one line"),
        ('like = "llama3-8b"\nname = 3\n', "name must be text, not 3"),
        (SHORT + "ffn = 256\nhiden = 3\n", "did you mean 'hidden'"),
        (SHORT + 'ffn = "wide"\n', "ffn must be a whole number, not 'wide'"),
        (SHORT + "ffn = 2.5\n", "ffn must be a whole number"),
        (SHORT + "ffn = 0\n", "ffn must be at least 1"),
        (SHORT + "ffn = 256\nexperts = -2\n", "experts must not be negative"),
        (SHORT + "ffn = 256\nbias = 1\n", "bias must be true or false"),
        (SHORT + "ffn = 256\nkv_heads = 3\n", "must be a multiple of kv_heads"),
        (SHORT + "ffn = 256\nexperts = 4\n", "experts_per_token must be from 1 to experts"),
        (SHORT + "ffn = 256\nload_imbalance = nan\n", "load_imbalance nan is of experts, and there are none"),
        ('like = "mixtral-8x7b"\nload_imbalance = 0.5\n', r"from 1 to experts \(8\), not 0.5"),
        ('like = "llama3-8b"\nrotary_base = inf\n', "rotary_base must be finite, such as 10000"),
        ('like = "llama3-8b"\nheads = 30\n', "hidden 4096 is no multiple of heads 30: say head_size"),
        ('like = "llama3-8b"\nwindow = 10\nwindow_layers = 99\n', "window_layers 99 is more than layers 32"),
        ('like = "llama3-8b"\nlayers = 1000000000000\n', "layers must be at most 100000"),
        ('like = "llama3-8b"\nvocab = 100000000000000000000000\n', "vocab must be at most"),
        (SHORT + "ffn = 256\n[latent]\nrank = 3\n", "no key 'rank'"),
        (SHORT + "ffn = 256\n[latent]\nquery_rank = 3\n", "has no kv_rank"),
        ('like = "lama3-8b"\n', "did you mean 'llama3-8b'"),
    ],
)
def test_files_that_cannot_be_planned_are_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(TrineError, match=message) as caught:
        workload_of(path)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert str(caught.value).count(str(path)) == 1


def test_what_a_table_says_is_used(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text('like = "mixtral-8x7b"\nname = "ours"\nsource = "here"\naliases = ["x"]\nexperts = 4\n')
    assert (workload_of(path).name, workload_of(path).experts_per_token) == ("ours", 2)
    path.write_text(
        'like = "mixtral-8x7b"\nexperts = 0\n'
    )  # what else is the known model's is not the file's to say
    assert not workload_of(path).is_mixture
    path.write_text('like = "llama3-8b"\nwindow = 64\nwindow_layers = 5\nrotary_base = 1e6\n')
    assert (workload_of(path).window_layers, workload_of(path).rotary_base) == (5, 1e6)


def test_the_mark_that_editors_begin_a_file_with_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    path.write_text('like = "llama3-8b"\n', encoding="utf-8-sig")
    assert workload_of(path).layers == 32
    config = tmp_path / "config.json"
    small = {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": 160,
        "n_positions": 96,
    }
    config.write_text(json.dumps(small), encoding="utf-8-sig")
    assert workload_of(config).layers == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("llama3-80b", "did you mean 'llama3-8"),
        ("no/such/folder/model.toml", "cannot read the workload"),
        ("no/such/config.json", "cannot read the configuration"),
        ("", "no model is named"),
    ],
)
def test_sources_that_are_not_there(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrineError, match=message):
        workload_of(source)


def test_json_that_is_no_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("[1, 2]", "{", "\xff"):
        path.write_text(text, encoding="latin-1")
        with pytest.raises(TrineError) as caught:
            workload_of(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


# --- FLOPs ---------------------------------------------------------------------------------------


def test_flops_by_narayanans_equation() -> None:
    # Narayanan et al. 2021, equation 3, of which a quarter is recomputation: 72·s·l·h²(1 + s/6h + V/12lh) a sequence.
    layers, hidden, sequence, vocab = 48, 6144, 2048, 51200
    workload = Workload("22b", layers, hidden, 64, 4 * hidden, vocab, sequence)
    exact = 72 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocab / (12 * layers * hidden))
    assert workload.model_flops("narayanan") == pytest.approx(exact, rel=1e-3)  # norms and biases beside it


def test_flops_by_palms_appendix() -> None:
    # Chowdhery et al. 2022, appendix B: 6N + 12·L·H·Q·T a token; PaLM 540B has 118 layers, 48 heads of 256.
    workload = Workload(
        "palm-540b",
        118,
        18432,
        48,
        4 * 18432,
        256000,
        2048,
        kv_heads=1,
        head_size=256,
        gated=True,
        bias=False,
        norms=1,
    )
    assert workload.parameters == pytest.approx(540.35e9, rel=2e-3)
    exact = 6 * workload.parameters + 12 * 118 * 48 * 256 * 2048
    assert workload.model_flops("palm") == pytest.approx(exact, rel=1e-3)


def test_a_window_sees_what_it_can() -> None:
    full = Workload("w", 2, 64, 4, 256, 100, 16)
    assert full.attended == 8
    windowed = Workload("w", 2, 64, 4, 256, 100, 16, window=4)
    assert windowed.attended == pytest.approx(4 - 16 / 32)
    half = Workload("w", 2, 64, 4, 256, 100, 16, window=4, window_layers=1)
    assert half.attended == pytest.approx((full.attended + windowed.attended) / 2)


@pytest.mark.parametrize(
    ("text", "told"), [("null", "holds null"), ("[]", "holds an array"), ("3", "holds a number")]
)
def test_json_is_told_in_its_own_words(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TrineError, match=told):
        workload_of(path)
