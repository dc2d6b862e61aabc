"""The Hugging Face form of a checkpoint as a GGUF file, bit for bit, by llama.cpp's own converter.

    PYTHON -m bench.studies.peers.gguf_form SOURCE OUT.gguf --llama-cpp TREE

TREE is a llama.cpp source tree; the source distribution of llama-cpp-python has one in `vendor/llama.cpp`.
PYTHON needs torch and transformers. Values stay in bfloat16, which holds them exactly. The vocabulary is
that of the synthetic tokenizer, which the converter does not know by its hash, with a merge, without which
llama.cpp will not load; the comparison hands over ids alone.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    """Convert."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True)
    options = parser.parse_args()
    sys.path[:0] = [str(options.llama_cpp), str(options.llama_cpp / "gguf-py")]
    gguf: Any = importlib.import_module("gguf")
    conversion: Any = importlib.import_module("conversion")
    base: Any = conversion.get_model_class("Qwen4ExpForConditionalGeneration")

    class Converter(base):
        """The converter with a vocabulary that it can write."""

        model_arch = base.model_arch

        def get_vocab_base_pre(self, tokenizer: Any) -> str:
            """Return a pre-tokenizer that llama.cpp knows; nothing is tokenized."""
            del tokenizer
            return "qwen2"

        def set_vocab(self) -> None:
            """Write the vocabulary."""
            tokens, types, pre = self.get_vocab_base()
            tokens = [f"w{number}" for number in range(len(tokens))]  # half a character would not be told
            self.gguf_writer.add_tokenizer_model("gpt2")
            self.gguf_writer.add_tokenizer_pre(pre)
            self.gguf_writer.add_token_list(tokens)
            self.gguf_writer.add_token_types(types)
            self.gguf_writer.add_token_merges(["a b"])

    kind = gguf.LlamaFileType.MOSTLY_BF16
    Converter(options.source, kind, options.out, eager=True, use_temp_file=True).write()


if __name__ == "__main__":
    main()
