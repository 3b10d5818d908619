"""If this fails, generated text is cut, or not sampled as asked. Generation: the cache changes no
token, sampling follows its definition, text is complete."""

from __future__ import annotations

import math
import random
from unittest import mock

import pytest
import torch

from ringfa3 import plan_context
from train.config import ConfigError, GenerateConfig, ModelConfig, ParallelConfig
from train.data.encoder import DocumentEncoder
from train.data.tokenizer import train_tokenizer
from train.engine.parallel import join
from train.model.transformer import LanguageModel, Transformer
from train.run.run_folder import RunFolder, read_config
from train.tasks import generate
from train.tasks.generate import as_text, choose, continuation, never_generated, probabilities
from train.tasks.load_model import load_model

VOCABULARY = 60
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def model():
    options = ModelConfig(n_layers=2, dim=32, ffn_dim=48, zero_init=False)
    return LanguageModel(Transformer(options, VOCABULARY, seed=3), torch.float32, 64)


def greedy(model: LanguageModel, prompt: list[int], tokens: int) -> list[int]:
    """The most probable tokens after ``prompt``; each recomputes all tokens before it."""
    known = list(prompt)
    for _ in range(tokens):
        plan = plan_context([0, len(known)])
        with torch.no_grad():
            hidden = model.transformer(torch.tensor(known), plan.positions, plan)
        logits = hidden[-1] @ model.transformer.head.T
        logits[0] = -torch.inf
        known.append(int(logits.argmax()))
    return known[len(prompt) :]


def test_greedy_with_cache_is_greedy_by_full_recomputation(model):
    """Token by token; the reference recomputes all tokens through the ring layer at each step."""
    prompt = [0, 7, 11]
    options = GenerateConfig(tokens=40, temperature=0.0)
    got = list(continuation(model, prompt, options, sample=0, never=[0]))
    assert got == greedy(model, prompt, 40)
    assert len(set(got)) > 5


def test_a_text_stops_before_the_token_that_ends_documents(model):
    options = GenerateConfig(tokens=40, temperature=0.0)
    whole = list(continuation(model, [0, 7, 11], options, sample=0, never=[0]))
    end = whole[9]
    got = list(continuation(model, [0, 7, 11], options, sample=0, never=[0], eos=end))
    assert got == whole[: whole.index(end)]


def test_the_same_seed_gives_the_same_text(model):
    def write(seed: int, sample: int) -> list[int]:
        options = GenerateConfig(tokens=20, temperature=1.0, seed=seed)
        return list(continuation(model, [0, 5], options, sample, never=[0]))

    assert write(1, 0) == write(1, 0)
    assert len({tuple(write(seed, sample)) for seed in (1, 2) for sample in (0, 1)}) == 4


def test_tokens_that_are_no_label_are_never_generated(model):
    """The one that starts documents, and the padding of the vocabulary."""
    options = GenerateConfig(tokens=300, temperature=50.0)  # nearly uniform over 60 tokens
    written = list(continuation(model, [0], options, sample=0, never=[0, *range(50, 60)]))
    assert not {0, *range(50, 60)} & {*written}
    assert len(set(written)) > 35


def test_the_threads_of_the_config_generate(config, monkeypatch):
    """Until the model is loaded; the number of this process is restored."""
    before = torch.get_num_threads()
    config.parallel.threads = before + 1
    monkeypatch.setattr(generate, "load_model", mock.Mock(side_effect=ConfigError("loaded")))
    try:
        with pytest.raises(ConfigError, match="loaded"):
            generate.run(config)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_samples_of_one_document_train_every_position(trained_run, pretrain):
    arguments = ["mode=generate", f"run.dir={trained_run}", "data.max_doc_len=100"]
    for mask, warned in (("true", True), ("false", False)):
        done = pretrain(*arguments, f"data.document_mask={mask}", "generate.tokens=120")
        assert done.returncode == 0, done.stderr
        assert ("was not trained on" in done.stderr) == warned


def direct(logits, temperature, top_k, top_p):
    """The definition, in Python floats: softmax, the top_k, renormalise, the fewest for top_p."""
    weights = {i: math.exp(x / temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])[: top_k or len(logits)]
    total = sum(weights[i] for i in ranked)
    kept, reached = [], 0.0
    for i in ranked:
        if top_p is not None and reached >= top_p:
            break
        kept.append(i)
        reached += weights[i] / total
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.9, 1.0])
def test_top_k_and_top_p_follow_their_definition(temperature, top_k, top_p):
    """Against a direct computation, 1e-12, over logits without ties."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)).double()
    got = probabilities(logits, temperature, top_k, top_p)
    expected = direct(logits.tolist(), temperature, top_k, top_p)
    assert got.tolist() == pytest.approx(expected, abs=1e-12)


def test_draws_follow_the_probabilities():
    """20,000 draws: each frequency within 5 standard deviations."""
    logits, generator = torch.tensor([0.0, 1.0, 2.0, -1.0]), torch.Generator().manual_seed(0)
    options, n = GenerateConfig(temperature=1.0, top_k=3), 20_000
    drawn = [choose(logits, options, generator) for _ in range(n)]
    for token, share in enumerate(probabilities(logits, 1.0, 3, None).tolist()):
        spread = math.sqrt(n * share * (1 - share))
        assert abs(drawn.count(token) - n * share) <= 5 * spread


def test_streamed_pieces_are_whole_characters_and_sum_to_the_text():
    """Texts of multi-byte characters, and random tokens that are not UTF-8."""
    text = "naïve λ, 日本語 🜚 \n" * 3
    tokenizer = train_tokenizer(["plain words only"], 300, "<|endoftext|>")
    ids = tokenizer.encode(text).ids
    parts = list(as_text(tokenizer, iter(ids)))
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)
    assert len(parts) > 20
    for seed in range(200):
        ids = random.Random(seed).choices(range(1, tokenizer.get_vocab_size()), k=30)
        assert "".join(as_text(tokenizer, iter(ids))) == tokenizer.decode(ids)


def test_generated_text_is_that_of_the_weights(pretrain, trained_run):
    """Greedy text, alone on stdout, against full recomputation in this process."""
    done = pretrain(
        *("mode=generate", f"run.dir={trained_run}", "generate.temperature=0"),
        *("generate.tokens=30", "generate.prompt='ring, attention'"),
    )
    assert done.returncode == 0, done.stderr
    config = read_config(trained_run / "config.json")
    config.run.dir = str(trained_run)
    parallel = join(ParallelConfig(), torch.device("cpu"))
    trained = load_model(config, RunFolder(config), parallel, None, print)
    prompt = [0, *trained.tokenizer.encode("ring, attention").ids]
    expected = greedy(trained.model, prompt, 30)
    assert len(set(expected)) > 1  # an untrained head is zero and repeats one token
    assert done.stdout == trained.tokenizer.decode(expected) + "\n"
    assert f"{trained.checkpoint}; a prompt of {len(prompt) - 1} tokens" in done.stderr
    config.model.vocab_size = 320  # 20 rows of padding
    for eos, never in ((None, []), ("none", [0])):  # the token that begins documents ends them too
        config.data.eos_token = eos
        encoder = DocumentEncoder(trained.tokenizer, config.data)
        assert never_generated(config, encoder) == [*never, *range(300, 320)]


def test_a_prompt_comes_from_stdin_and_samples_differ(pretrain, trained_run):
    command = ["mode=generate", f"run.dir={trained_run}", "parallel.cp=all"]
    command += ["generate.prompt=-", "generate.samples=2", "generate.tokens=20"]
    done = pretrain(*command, given="every token")
    assert done.returncode == 0, done.stderr
    assert "sample 2 of 2" in done.stderr
    assert len(done.stdout) > 20
    half = len(done.stdout) // 2
    assert done.stdout[:half] != done.stdout[half:]


@pytest.mark.parametrize(
    ("arguments", "world", "message"),
    [
        ([], "2", "mode=generate under torchrun: one process writes text"),
        (["mode=export", "export.dir=/nowhere"], "2", "under torchrun: one process writes the fo"),
        (["model=tiny"], "1", "takes the model and its settings from the run"),
        (["generate.checkpoint=/nowhere"], "1", "/nowhere"),
        (["model.dim=64"], "1", "does not fit this model"),
        (["generate.top_p=1.5"], "1", "nearest valid: generate.top_p=1"),
    ],
    ids=["torchrun", "export", "group", "checkpoint", "shape", "top_p"],
)
def test_an_impossible_generation_exits_2(
    pretrain, trained_run, monkeypatch, arguments, world, message
):
    monkeypatch.setenv("WORLD_SIZE", world)
    done = pretrain("mode=generate", f"run.dir={trained_run}", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert done.stdout == ""
