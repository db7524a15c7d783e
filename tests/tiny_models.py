"""Tiny random models, made once a session with transformers' own config classes, and a small byte-level tokenizer."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported: the test machine is shared

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from nanoserve.attention import attend_torch
from nanoserve.model import CausalLM

torch.set_num_threads(2)
CORPUS = ["the quick brown fox jumps over the lazy dog", "hello world, how are you today?", "one two three four five"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if style is defined %}[{{ style }}]{% endif %}"
)
SIZES = dict(
    vocab_size=288, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=1, initializer_range=0.3,
)  # fmt: skip
LLAMA3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "llama-tied-bias": lambda: LlamaConfig(
        **SIZES, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=24
    ),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "qwen3-tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True, attention_bias=True),
}


def make_model_of_nothing() -> CausalLM:
    config = CONFIGS["llama"]()
    config.architectures = ["LlamaForCausalLM"]
    with torch.device("meta"):
        return CausalLM(config, attend_torch)


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=288, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


def save_model(config, folder, **save_options):
    """A random model of this config as a Hugging Face folder; biases and norms are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder, **save_options)
    make_tokenizer().save_pretrained(folder)
    return model
