#!/usr/bin/env python3
"""The other side of the hf tests: the Python packages transformers and tokenizers.

hf_peer.py installed                    exit status 0 if both are there
hf_peer.py models FOLDER                small random models, one folder each, with tokens and logits in expected.safetensors
hf_peer.py logits FOLDER...             opens the model in each FOLDER and compares its logits with those in the file FOLDER.expected
hf_peer.py tokenizers FOLDER            tokenizers NAME.json, and NAME.cases.json with fuzzed texts and what they become
hf_peer.py open FOLDER TEXT             opens model and tokenizer in FOLDER by their Auto classes; prints the tokens of TEXT
hf_peer.py dcp-write FOLDER             a folder of HuggingFaceStorageWriter, in two parts, as two ranks would write it
hf_peer.py dcp-read FOLDER EXPECTED     loads FOLDER with HuggingFaceStorageReader and compares it with the safetensors file EXPECTED
"""
import importlib.util
import json
import os
import random
import sys

SMALL = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, initializer_range=0.3)


def rope(kind, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=500.0, **more))


def model_configs():
    from transformers import LlamaConfig, Qwen3Config, Qwen3MoeConfig

    moe = dict(SMALL, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True)
    return {
        "llama": LlamaConfig(**SMALL),
        "llama_mha_bias_tied": LlamaConfig(**dict(SMALL, num_key_value_heads=4), attention_bias=True, tie_word_embeddings=True),
        "llama_head_dim": LlamaConfig(**SMALL, head_dim=12),
        "llama_linear": LlamaConfig(**SMALL, **rope("linear", factor=4.0)),
        "llama_dynamic": LlamaConfig(**dict(SMALL, max_position_embeddings=16), **rope("dynamic", factor=4.0)),
        "llama_llama3": LlamaConfig(**SMALL, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                    original_max_position_embeddings=24)),
        "llama_yarn": LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=16)),
        "llama_yarn_more": LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8.0, beta_slow=2.0,
                                                       attention_factor=1.3, truncate=False)),
        "llama_yarn_mscale": LlamaConfig(**SMALL, **rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7,
                                                         mscale_all_dim=1.4)),
        "qwen3": Qwen3Config(**SMALL, head_dim=16),
        "qwen3_bias_tied": Qwen3Config(**SMALL, head_dim=8, attention_bias=True, tie_word_embeddings=True),
        "qwen3_moe": Qwen3MoeConfig(**moe),
        "qwen3_moe_mixed": Qwen3MoeConfig(**dict(moe, norm_topk_prob=False, num_hidden_layers=4), decoder_sparse_step=2),
    }


def randomize(model):
    import torch

    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases, which begin as constants
            parameter.data.normal_(0.0 if name.endswith("bias") else 1.0, 0.2)
    return model.eval()


def models(folder):
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    for name, config in model_configs().items():
        torch.manual_seed(3)
        model = randomize(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
        path = os.path.join(folder, name)
        model.save_pretrained(path, max_shard_size="20KB" if name in ("llama", "qwen3_moe") else "5GB")
        tokens = torch.randint(0, config.vocab_size, (2, 40))
        with torch.no_grad():
            save_file({"tokens": tokens, "logits": model(tokens).logits.contiguous()}, os.path.join(path, "expected.safetensors"))
    # The older way to write rotary parameters.
    path = os.path.join(folder, "llama_llama3", "config.json")
    with open(path) as file:
        config = json.load(file)
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    with open(path, "w") as file:
        json.dump(config, file)


def logits(*folders):
    return max([same_logits(folder) for folder in folders], default=1)


def same_logits(folder):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    want = load_file(folder + ".expected")
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.no_grad():
        got = model(want["tokens"]).logits
    worst = (got - want["logits"]).abs().max().item()
    print(f"{os.path.basename(folder)}: largest difference {worst:.3g}, logits of {want['logits'].abs().mean().item():.3g}")
    return 0 if worst < 1e-3 and want["logits"].std() > 0.1 else 1


CORPUS = """The quick brown fox can't jump over 12345 lazy dogs; they've said so, haven't they? I'LL SEE.
Übergrößen, naïveté, e\u0301 and é, Ångström, ﬁne ½ ² ٣٤ Ⅷ, 日本語のテキスト 中文 한국어 русский ελληνικά עברית العربية हिन्दी
def f(x):\n\treturn x ** 2  # 100%\n\n\nif a<b and c>=d: print("!!!", '???')\r\n   indented    text \u00a0 nbsp\u3000wide \u2028 line
emoji 😀👍🏽👨‍👩‍👧 flags 🇩🇪 zero\u200bwidth \ufeffbom"""


def tokenizer_kinds():
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    gpt4 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    qwen = gpt4.replace(r"\p{N}{1,3}", r"\p{N}")
    byte_level = pre_tokenizers.ByteLevel

    def split(pattern):
        return pre_tokenizers.Split(Regex(pattern), "isolated")

    kinds = {
        "llama3": (None, [split(gpt4), byte_level(add_prefix_space=False, use_regex=False)]),
        "qwen": (normalizers.NFC(), [split(qwen), byte_level(add_prefix_space=False, use_regex=False)]),
        "gpt2": (None, [byte_level(add_prefix_space=False)]),
        "prefix": (normalizers.NFKC(), [byte_level(add_prefix_space=True)]),
        "digits": (normalizers.Sequence([normalizers.NFD()]), [pre_tokenizers.Digits(individual_digits=True), byte_level()]),
        "removed": (None, [pre_tokenizers.Split("-", "removed"), byte_level(add_prefix_space=False)]),
    }
    for name, (normalizer, steps) in kinds.items():
        tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=byte_level.alphabet(), special_tokens=["<|begin|>", "<|end|>"],
                                      show_progress=False)
        tokenizer.train_from_iterator([CORPUS] * 3, trainer)
        tokenizer.add_special_tokens([AddedToken("<|end|>x", special=True), AddedToken("<strip>", lstrip=True, rstrip=True, special=True)])
        tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("caf\u00e9", normalized=True), AddedToken("  two spaces ", normalized=True)])
        if name in ("llama3", "prefix"):
            template = processors.TemplateProcessing(single="<|begin|> $A" + (" <|end|>" if name == "prefix" else ""),
                                                     special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        elif name == "gpt2":
            tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        yield name, tokenizer


def fuzzed_texts(rng, count):
    pieces = ["<|begin|>", "<|end|>", "<|end|>x", "<strip>", "<tool>", "café", "cafe\u0301", "  two spaces ", "'s", "'LL", "'ve", "\u017f", " ", "  ", "\n", "\r\n",
              "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "123", "4", "½", "-", "...", "\x00", "\x1c", "e\u0301", "\u1112\u1161\u11ab", "한", "ﬁ", "Ⅷ", "😀",
              "👨‍👩‍👧", "\U0010ffff", "\ufffd", "א", "ا", "的", "ß", "İ", "K"]
    words = CORPUS.split(" ")
    yield from ["", " ", "a", *pieces, CORPUS]
    for _ in range(count):
        text = ""
        for _ in range(rng.randint(1, 12)):
            kind = rng.randrange(5)
            if kind == 0:
                text += rng.choice(pieces)
            elif kind == 1:
                text += rng.choice(words) + rng.choice(["", " ", "\n"])
            elif kind == 2:
                text += chr(rng.choice([rng.randrange(0x20, 0x7f), rng.randrange(0xa0, 0x250), rng.randrange(0x370, 0x530), rng.randrange(0x4e00, 0x9fff),
                                        rng.randrange(0x1f300, 0x1f600), rng.randrange(0xac00, 0xd7a3), rng.randrange(0x0, 0x20)]))
            elif kind == 3:
                text += "".join(rng.choice(" \n\t'abcXYZ019.,!") for _ in range(rng.randint(1, 20)))
            else:
                text += rng.choice("aé日 ") * rng.randint(1, 40)
        yield text


def tokenizers(folder):
    for name, tokenizer in tokenizer_kinds():
        tokenizer.save(os.path.join(folder, name + ".json"))
        rng = random.Random(7)
        cases = []
        for text in fuzzed_texts(rng, 1500):
            ids, plain = tokenizer.encode(text).ids, tokenizer.encode(text, add_special_tokens=False).ids
            cases.append(dict(text=text, ids=ids, plain=plain, decoded=tokenizer.decode(ids, skip_special_tokens=False),
                              skipped=tokenizer.decode(ids, skip_special_tokens=True)))
        sequences = []
        for _ in range(500):
            ids = [rng.randrange(tokenizer.get_vocab_size() + 3) for _ in range(rng.randint(1, 30))]
            sequences.append(dict(ids=ids, decoded=tokenizer.decode(ids, skip_special_tokens=False)))
        with open(os.path.join(folder, name + ".cases.json"), "w") as file:
            json.dump(dict(size=tokenizer.get_vocab_size(), cases=cases, sequences=sequences), file)


def open_folder(folder, text):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    encoded = tokenizer(text, return_tensors="pt")
    assert model(encoded["input_ids"]).logits.shape[1] == encoded["input_ids"].shape[1]
    print("tokens", encoded["input_ids"][0].tolist(), "dtype", str(model.dtype))
    return 0


def dcp_tensors():
    import torch

    torch.manual_seed(1)
    return {"embed.weight": torch.rand(7, 6), "step": torch.tensor(5), "half": torch.rand(4, 3).to(torch.bfloat16)}


def dcp_write(folder):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world,))
    tensors = dcp_tensors()
    state = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            if rank == 0:
                state[name] = tensor
            continue
        rows = -(-tensor.shape[0] // world)
        local = tensor[rank * rows:(rank + 1) * rows].contiguous()
        state[name] = DTensor.from_local(local, mesh, [Shard(0)], shape=tensor.shape, stride=tensor.stride())
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(path=os.path.join(folder, "dcp"), save_distributed=True))
    if rank == 0:
        save_file(tensors, os.path.join(folder, "expected.safetensors"))
    dist.barrier()
    dist.destroy_process_group()


def dcp_read(folder, expected):
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    want = load_file(expected)
    got = {name: torch.empty_like(tensor) for name, tensor in want.items()}
    dcp.load(got, storage_reader=dcp.HuggingFaceStorageReader(folder))
    different = [name for name in want if not torch.equal(got[name], want[name])]
    print("different", different)
    return 1 if different or not want else 0


def main():
    if sys.argv[1] == "installed":
        return 0 if all(importlib.util.find_spec(name) for name in ("transformers", "tokenizers")) else 1
    if "transformers" in sys.modules or sys.argv[1] in ("models", "logits", "open"):
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    commands = {"models": models, "logits": logits, "tokenizers": tokenizers, "open": open_folder, "dcp-write": dcp_write, "dcp-read": dcp_read}
    return commands[sys.argv[1]](*sys.argv[2:]) or 0


if __name__ == "__main__":
    sys.exit(main())
