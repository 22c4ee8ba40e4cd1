"""Models of PEFT: what is in their checkpoints, and that they go on from them bit for bit, on one rank and on two."""

from pathlib import Path

import pytest
import torch
from torch import nn

from allstep.checkpoint.weights import read_weights, restore_weights, write_weights
from allstep.errors import CheckpointError

peft = pytest.importorskip("peft", reason="its models are trained")
transformers = pytest.importorskip("transformers", reason="its models are trained")

ROWS = 12


def gpt2():
    torch.manual_seed(0)
    still = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_layer=1, n_embd=16, n_head=2, **still, **ids)
    return transformers.GPT2LMHeadModel(config)


def bert():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=40, max_position_embeddings=32, **sizes)
    )


def lora(model=None, adapter_name="default", **more):
    settings = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM", **more}
    return peft.get_peft_model(gpt2() if model is None else model, peft.LoraConfig(**settings), adapter_name)


def of_bert(**more):
    return lora(bert(), target_modules=["query"], fan_in_fan_out=False, task_type="SEQ_CLS", **more)


def two_adapters():
    model = lora()
    model.add_adapter("other", peft.LoraConfig(r=4, target_modules=["c_proj"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
    return model


def prompted(kind, **more):
    return peft.get_peft_model(gpt2(), kind(num_virtual_tokens=3, task_type="CAUSAL_LM", **more))


def of_layers(norm, **more):
    torch.manual_seed(0)
    return peft.get_peft_model(nn.Sequential(nn.Linear(3, 3), norm), peft.LoraConfig(r=2, target_modules=["0"], **more))


def of_llama():
    """Of its kind transformers takes the mean that we take."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=40, max_position_embeddings=32, **sizes))
    return lora(model, target_modules=["q_proj"], fan_in_fan_out=False)


def half_frozen():
    model = lora()
    model.get_base_model().transformer.ln_f.requires_grad_(True)
    return model


FILE = "adapter_model.safetensors"
ALONE = {
    "LoRA": (lora, {FILE}),
    "of another name": (lambda: lora(adapter_name="mine"), {f"mine/{FILE}"}),
    "two": (two_adapters, {FILE, f"other/{FILE}"}),
    "with a head": (of_bert, {FILE}),
    "with biases": (lambda: of_bert(bias="all"), {FILE}),
    "DoRA": (lambda: of_bert(use_dora=True), {FILE}),
    "on embeddings": (lambda: lora(target_modules=["wte", "c_attn"]), {FILE}),
    "with tokens": (lambda: lora(trainable_token_indices=[1, 2]), {FILE}),
    "IA3": (
        lambda: peft.get_peft_model(
            bert(), peft.IA3Config(target_modules=["key"], feedforward_modules=[], task_type="SEQ_CLS")
        ),
        {FILE},
    ),
    "VeRA": (lambda: peft.get_peft_model(bert(), peft.VeraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")), {FILE}),
    "prompts": (lambda: prompted(peft.PromptTuningConfig), {FILE}),
    "prefixes": (lambda: prompted(peft.PrefixTuningConfig), {FILE}),
    "no model of transformers": (lambda: of_layers(nn.LayerNorm(3), modules_to_save=["1"]), {FILE}),
}
WHOLE = {
    "prompts made by a network": lambda: prompted(peft.PromptEncoderConfig, encoder_hidden_size=8),
    "a base that is trained too": half_frozen,
    "a base with statistics": lambda: of_layers(nn.BatchNorm1d(3)),
}


def moved(rank, size, make, folder):
    """Files of weights of a model that is not as it was made, and the names that do not come back from them."""
    source = make()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in source.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    Path(folder).mkdir(exist_ok=True)
    names = write_weights(source, Path(folder))
    target = make()
    assert restore_weights(target, read_weights(Path(folder)), Path(folder)) is None
    own = target.state_dict()
    lost = [name for name, value in source.state_dict().items() if not torch.equal(value, own[name])]
    return {name for name in names if name.endswith(".safetensors")}, lost


def alone(rank, size, folder):
    return {kind: moved(rank, size, make, f"{folder}/{kind}") for kind, (make, _) in ALONE.items()}


def whole(rank, size, folder):
    return {kind: moved(rank, size, make, f"{folder}/{kind}") for kind, make in WHOLE.items()}


def test_adapters_are_written_alone_and_come_back(one_rank, tmp_path):
    (found,) = one_rank.run(alone, str(tmp_path))
    assert found == {kind: (files, []) for kind, (_, files) in ALONE.items()}


def test_the_whole_model_is_written_where_training_changes_more(one_rank, tmp_path):
    (found,) = one_rank.run(whole, str(tmp_path))
    assert found == {kind: ({FILE, "model.safetensors"}, []) for kind in WHOLE}


def refused(rank, size, folder):
    """Messages where weights do not fit."""
    folder = Path(folder)
    write_weights(lora(), folder)
    messages = []
    for model in (gpt2(), two_adapters(), lora(r=4)):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(CheckpointError) as caught:
            restore_weights(model, read_weights(folder), folder)
        messages.append(str(caught.value))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError) as caught:
        read_weights(folder)
    return [*messages, str(caught.value)]


def test_what_does_not_fit_is_said(one_rank, tmp_path):
    ((none, fewer, shape, pickled),) = one_rank.run(refused, str(tmp_path))
    assert "are adapters of PEFT, and this GPT2LMHeadModel has none. Give the Trainer what peft.get_peft_model" in none
    assert "The files lack base_model.model.transformer.h.0.attn.c_proj.lora_A.other.weight" in fewer
    assert "c_attn.lora_A.default.weight has shape (2, 16) in the files, (4, 16) in the model." in shape
    assert "adapter_model.bin is a pickled file" in pickled
    assert "adapter_model.safetensors')" in pickled


# ---- runs


def rows():
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": ids, "labels": ids, "text": "left out"} for ids in torch.randint(2, 40, (ROWS, 6), generator=generator)
    ]


def predicted(rank, size, folder):
    """Shapes of what is predicted: logits alone, without the keys and values that a decoder keeps."""
    from allstep import Trainer, TrainingArguments

    return [
        Trainer(make(), TrainingArguments(folder)).predict(rows()[:3]).predictions.shape
        for make in (gpt2, lora, lambda: prompted(peft.PrefixTuningConfig))
    ]


def test_what_is_predicted_are_logits(one_rank, tmp_path):
    assert one_rank.run(predicted, str(tmp_path)) == [[(3, 6, 40)] * 3]


def train(rank, size, folder, make, settings, resume=None, whose="ours"):
    import allstep

    package = allstep if whose == "ours" else transformers
    settings = {**settings, "use_cpu": True}
    args = package.TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2 // size, max_steps=4, logging_steps=1,
        save_steps=2, learning_rate=0.01, weight_decay=0.1, train_sampling_strategy="sequential",
        per_device_eval_batch_size=2, **settings,
    )  # fmt: skip
    trainer = package.Trainer(make(), args, train_dataset=rows(), eval_dataset=rows()[:5])
    trainer.train(resume_from_checkpoint=resume)
    trained = [group["params"] for group in trainer.optimizer.param_groups]
    assert sum(map(len, trained)) == sum(parameter.requires_grad for parameter in trainer.model.parameters())
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    return losses, weights, trainer.state.best_global_step


def same(one, other):
    return one[0] == other[0] and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize("make", [lora, pytest.param(two_adapters, marks=pytest.mark.long)])
def test_a_run_goes_on_bit_for_bit_on_one_rank_and_on_two(one_rank, ranks, tmp_path, make):
    (reference,) = one_rank.run(train, str(tmp_path / "one"), make, {})
    of_two = ranks.run(train, str(tmp_path / "two"), make, {"save_in_background": True})
    assert all(same(reference, each) for each in of_two)
    folder = tmp_path / "two" / "checkpoint-2"
    written = {path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors")}
    assert written == ({FILE} if make is lora else {FILE, f"other/{FILE}"})
    assert (folder / "adapter_config.json").exists()
    (resumed,) = one_rank.run(train, str(tmp_path / "more"), make, {}, str(folder))
    assert same(reference, resumed)


def best_of(rank, size, folder):
    """Whether the best checkpoint is what training ends with, and what peft reads from its folder."""
    settings = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "greater_is_better": True}
    _, weights, best = train(rank, size, folder, lora, settings)  # the greatest loss is that of an early step
    read = peft.PeftModel.from_pretrained(gpt2(), f"{folder}/checkpoint-{best}", is_trainable=True).state_dict()
    return best, [name for name, value in weights.items() if not torch.equal(read[name], value)]


def test_the_best_adapters_are_loaded_and_read_by_peft(ranks, tmp_path):
    assert ranks.run(best_of, str(tmp_path)) == [(2, [])] * 2


@pytest.mark.parametrize(("first", "second"), [("theirs", "ours"), ("ours", "theirs")])
def test_checkpoints_of_adapters_are_read_by_the_other(one_rank, tmp_path, first, second):
    (whole_run,) = one_rank.run(train, str(tmp_path), of_llama, {}, None, first)
    (resumed,) = one_rank.run(train, str(tmp_path / "more"), of_llama, {}, str(tmp_path / "checkpoint-2"), second)
    for name, value in whole_run[1].items():
        torch.testing.assert_close(resumed[1][name], value, rtol=1e-5, atol=1e-6)
