"""Texts that tokenizers disagree about: blanks, digits, composed characters, emoji, code, markers.

Characters that look like others are written as escapes.
"""

import random

CHARACTERS = (
    " \t\n\r  aAzZ09\u00e9\u00fc\u00f1\u00df\u017f\u01c5\u6f22\u5b57\u304b\u306a\ud55c\uae00"
    "\u0e44\u0e17\u0e22\u05e2\u05d1\u05e8\u05d9\u05ea\U0001f642\u0301\u200d\u00a0\u2028\u3000"
    "'\u2019.,;:!?-_()[]{}<>|/\\#@$%^&*+=~`\"\u2581\u0120\x00\x7f"
)
WORDS = (
    *("the", " of", "Hello", " world", "'s", "'LL", "I'd", "na\u00efve", "re\u0301sume\u0301"),
    *("\u1e9b\u0323", "\ufb01", "\u03a9\u2248\u00e7", "...", "?!?", "\u2014"),
    *("2024", "  42", "\t7", "1,234.50", "3.14e-10", "\u0663\u0664", "\u00bd", "\u2167", "x\u00b2"),
    *(
        "\u65e5\u672c\u8a9e",
        "\u0645\u0631\u062d\u0628\u0627",
        "\u0928\u092e\u0938\u094d\u0924\u0947",
    ),
    *("\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\U0001f1e9\U0001f1ea"),
    "\U0001f469\u200d\U0001f469\u200d\U0001f467",
    "\U0001f937\U0001f3fd\u200d\u2640\ufe0f",
    *("\r\n", "\n\n\n", "   ", "\u00a0\u00a0"),
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < 10; ++i) {\n\t\tx[i] *= 2;\n}\n",
    *("</div>", "https://example.org/a?b=c#d", "SELECT * FROM t;", "\\frac{a}{b}"),
    *("snake_case", "camelCase", "0x1F", "<0x0A>"),
    *("[INST]", "<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_start|>user\n",
)


def adversarial_texts(count: int, seed: int) -> list[str]:
    """Return texts of up to a dozen words and runs of characters, the first of them empty."""
    source = random.Random(seed)

    def piece() -> str:
        if source.random() < 0.5:
            return source.choice(WORDS)
        return "".join(source.choices(CHARACTERS, k=source.randint(1, 4)))

    return ["", *("".join(piece() for _ in range(source.randint(1, 12))) for _ in range(count - 1))]
