"""Models of transformers in checkpoints: the files are those of `save_pretrained`, and all ways back give the same bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from allstep.checkpoint.weights import read_weights, restore_weights, write_weights
from allstep.errors import CheckpointError

transformers = pytest.importorskip("transformers", reason="its models are saved")

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
PICTURES = {**SMALL, "image_size": 8, "patch_size": 4}


def gpt2():
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2, **ids)
    )


def t5():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=20, **sizes, **ids))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(**PICTURES))


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=40, **SMALL, **EXPERTS))


def llava():
    text, pictures = transformers.LlamaConfig(vocab_size=40, **SMALL), transformers.CLIPVisionConfig(**PICTURES)
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=pictures, text_config=text, image_token_index=3)
    )


def made(make, seed):
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model


def names_in(folder):
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def differences(one, other):
    other = other.state_dict()
    return [name for name, value in one.state_dict().items() if not torch.equal(value, other[name])]


def all_ways(rank, size, makes, folder):
    """For each model, what does not come back by our reading and by `from_pretrained`, and whose names are in the files."""
    found = {}
    for make in makes:
        source, ours, theirs, sharded = (
            made(make, 0),
            *(Path(folder, make.__name__, name) for name in ("ours", "theirs", "parts")),
        )
        for path in (ours, theirs, sharded):
            path.mkdir(parents=True)
        write_weights(source, ours)
        source.save_pretrained(theirs)
        source.save_pretrained(sharded, max_shard_size="10KB")
        assert len(list(sharded.glob("model-*"))) > 1
        lost = differences(source, type(source).from_pretrained(ours))
        for path in (ours, theirs, sharded):
            target = made(make, 1)
            assert restore_weights(target, read_weights(path), path) is None
            lost += differences(source, target)
        found[make.__name__] = lost, names_in(ours) == names_in(theirs), names_in(ours) <= source.state_dict().keys()
    return found


def test_all_ways_back_give_the_same_bits(one_rank, tmp_path):
    """ViT, Mixtral and LLaVA have other names, or other pieces, in their files than in memory."""
    (found,) = one_rank.run(all_ways, [gpt2, t5, vit, mixtral, llava], str(tmp_path))
    assert found == {
        "gpt2": ([], True, True),
        "t5": ([], True, True),
        "vit": ([], True, False),
        "mixtral": ([], True, False),
        "llava": ([], True, False),
    }


def mixed(rank, size, folder):
    """Of several dtypes, of which `from_pretrained` would make one."""
    source = made(vit, 0)
    source.classifier.bfloat16()
    write_weights(source, Path(folder))
    target = made(vit, 1)
    target.classifier.bfloat16()
    restore_weights(target, read_weights(Path(folder)), Path(folder))
    return differences(source, target), names_in(Path(folder)) == source.state_dict().keys()


def test_what_from_pretrained_would_cast_is_written_by_us(one_rank, tmp_path):
    assert one_rank.run(mixed, str(tmp_path)) == [([], True)]


def lacking(rank, size, folder):
    source, target = made(vit, 0), made(vit, 1)
    source.save_pretrained(folder)
    path = Path(folder, "model.safetensors")
    tensors = load_file(path)
    del tensors["classifier.bias"]
    save_file(tensors, path, metadata={"format": "pt"})
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        restore_weights(target, read_weights(Path(folder)), Path(folder))
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())
    return str(caught.value)


def test_a_tensor_that_is_missing_is_never_made_up(one_rank, tmp_path):
    (message,) = one_rank.run(lacking, str(tmp_path))
    assert "do not fit this ViTForImageClassification" in message


def run(rank, size, make, rows, folder, processor):
    """The files of the checkpoint and of the model that is saved at the end."""
    from allstep import Trainer, TrainingArguments

    args = TrainingArguments(folder, per_device_train_batch_size=2, max_steps=2, save_steps=1)
    trainer = Trainer(make(), args, train_dataset=rows, processing_class=None if processor is None else processor())
    trainer.train()
    trainer.save_model()
    read = type(trainer.model).from_pretrained(folder)
    files = [{path.name for path in at.iterdir()} for at in (Path(folder), Path(folder, "checkpoint-1"))]
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    return differences(read, trainer.model), *files


def processor():
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 8, "width": 8})


def test_a_model_and_what_prepares_its_inputs_are_in_the_folder(one_rank, ranks, tmp_path):
    generator = torch.Generator().manual_seed(0)
    pictures = [{"pixel_values": picture, "label": 1} for picture in torch.randn(4, 3, 8, 8, generator=generator)]
    for pool in (one_rank, ranks):
        for lost, *folders in pool.run(run, vit, pictures, str(tmp_path / str(pool.size)), processor):
            assert lost == []
            assert all({"model.safetensors", "config.json", "preprocessor_config.json"} <= files for files in folders)
    tokens = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 40, (4, 6), generator=generator)]
    ((lost, *folders),) = one_rank.run(run, gpt2, tokens, str(tmp_path / "tokens"), None)
    assert lost == []
    assert all({"config.json", "generation_config.json"} <= files for files in folders)
    assert json.loads((tmp_path / "tokens" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
