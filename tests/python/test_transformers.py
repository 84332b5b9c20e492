"""Models of Hugging Face's transformers, from small random configurations: the same steps as with FSDP2."""
import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor

import hyper_parallel as hp
import hyper_parallel.fsdp as ours
import ranks
from compare import BF16, compare
from ranks import run_ranks
from scripts import Record, mesh_of, policy, weights

WORDS = 61

# Every rank needs them, and they take seconds to import.
ranks.preload("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3",
              "transformers.models.qwen3_moe.modeling_qwen3_moe")


def model_of(kind, seed=3, **options):
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    config_type, model_type, more = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM,
                      {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}),
    }[kind]
    config = config_type(vocab_size=WORDS, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                         **more, **options)
    torch.manual_seed(seed)
    return model_type(config)


def shard(api, model, **options):
    for layer in model.model.layers:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def words(rank, step, rows=2):
    return torch.randint(3, WORDS, (rows, 9), generator=torch.Generator().manual_seed(1000 * step + rank))


def train(api, rank, world, kind="llama", dtype=None, reentrant=None, late=False, hybrid=0, tied=False, mask=False,
          optimizer=torch.optim.AdamW):
    model = model_of(kind, tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if reentrant is not None and not late:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.train()
    shard(api, model, mesh=mesh_of(world, hybrid), mp_policy=policy(api, dtype))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if reentrant is not None and late:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    update = optimizer(model.parameters(), lr=1e-2)
    record = Record()
    for step in range(3):
        tokens = words(rank, step)
        attention = torch.ones_like(tokens)
        if mask:
            attention[0, : 2 + rank] = 0
        result = model(input_ids=tokens, attention_mask=attention, labels=tokens, use_cache=False)
        result.loss.backward()
        record.step(model, update, result.loss, max_norm=1.0)
    return record.steps


@pytest.mark.parametrize("kind,world", [("llama", 1), ("llama", 2), ("llama", 4), ("qwen3", 1), ("qwen3", 2), ("qwen3", 4),
                                        ("qwen3_moe", 1), ("qwen3_moe", 2)])
def test_steps(kind, world):
    compare(world, train, kind=kind, mask=True)


def test_steps_hsdp():
    compare(4, train, hybrid=2)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_steps_in_bf16(kind):
    compare(2, train, kind=kind, optimizer=torch.optim.SGD, **BF16)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    compare(2, train, reentrant=reentrant)
    compare(1, train, kind="qwen3", reentrant=reentrant, late=True)


def test_tied_embeddings():
    compare(2, train, tied=True)
    compare(4, train, kind="qwen3", tied=True, hybrid=2)


def generation(rank, world, by):
    model, plain = model_of("llama").eval(), model_of("llama").eval()
    shard(ours, model, mesh=mesh_of(world, 0), reshard_after_forward=True)
    prompt = words(rank, 0)
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    if by == "unshard":
        for module in model.modules():
            if isinstance(module, ours.FSDPModule):
                module.unshard()
    got = model.generate(prompt, **options)
    assert torch.equal(got, plain.generate(prompt, **options)) and got.shape == (2, 15)
    # Sampling draws from each rank's own generator.
    torch.manual_seed(rank)
    got = model.generate(prompt, **{**options, "do_sample": True, "num_return_sequences": 2})
    torch.manual_seed(rank)
    assert torch.equal(got, plain.generate(prompt, **{**options, "do_sample": True, "num_return_sequences": 2}))
    # And on with training.
    model.train()
    model(input_ids=prompt, labels=prompt).loss.backward()
    assert all(isinstance(parameter, DTensor) and parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("by", ["forward", "unshard"])
def test_generate(by):
    run_ranks(2, generation, by)


def saved(rank, world, folder, tied):
    import os

    import torch.distributed as dist
    from transformers import AutoModelForCausalLM

    model = shard(ours, model_of("qwen3", tie_word_embeddings=tied), mesh=mesh_of(world, 0))
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = words(rank, 0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    update.step()
    update.zero_grad()
    full = hp.get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert bool(full) == (rank == 0)
    if rank == 0:
        model.save_pretrained(folder, state_dict=full)
    dist.barrier()
    assert os.path.exists(os.path.join(folder, "model.safetensors"))
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert type(again).__name__ == "Qwen3ForCausalLM" and again.config.architectures == ["Qwen3ForCausalLM"]
    for name, value in weights(model).items():
        torch.testing.assert_close(again.get_parameter(name).detach(), value, rtol=0, atol=0)
    # And sharded again.
    model.eval(), again.eval()
    want = model(input_ids=tokens).logits.detach()
    torch.testing.assert_close(again(input_ids=tokens).logits.detach(), want)
    shard(ours, again, mesh=mesh_of(world, 0))
    torch.testing.assert_close(again(input_ids=tokens).logits.detach(), want)


@pytest.mark.parametrize("tied", [False, True])
def test_save_pretrained(tied, tmp_path):
    run_ranks(2, saved, str(tmp_path), tied)
