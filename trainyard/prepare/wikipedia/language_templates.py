"""Templates for pronunciations and for names in Chinese, as readers of the English Wikipedia see them."""

import re

from trainyard.prepare.wikipedia.template_arguments import TemplateArguments, TemplateRule

CHINESE_LABELS = {
    "c": "Chinese", "s": "simplified Chinese", "t": "traditional Chinese", "p": "pinyin", "tp": "Tongyong Pinyin",
    "w": "Wade–Giles", "j": "Jyutping", "cy": "Cantonese Yale", "sl": "Sidney Lau", "poj": "Pe̍h-ōe-jī",
    "tl": "Tâi-lô", "zhu": "Zhuyin Fuhao", "l": "lit.", "tr": "trans.",
}  # fmt: skip
"""What {{zh}} writes before each argument, in the order in which it shows them."""
SOUND_FILE = re.compile(r".*\.(?:og[ga]|wav|mp3|flac|opus)", re.IGNORECASE)
ENGLISH_LABELS = {
    "lang": "English:", "pron": "pronounced", "ipa": "IPA:", "local": "locally", "uk": "UK:", "us": "US:",
    "ukalso": "UK also", "usalso": "US also", "also": "also", "alsouk": "also UK:", "alsous": "also US:",
}  # fmt: skip
"""Arguments of {{IPAc-en}} that are not sounds."""


def chinese(arguments: TemplateArguments) -> str:
    """{{zh|s=中国|t=中國|p=Zhōngguó}}: "simplified Chinese: 中国; traditional Chinese: 中國; pinyin: Zhōngguó"."""
    with_labels = arguments["labels"].lower() not in ("no", "n", "false", "0")
    out = []
    for key, label in CHINESE_LABELS.items():
        if text := arguments[key]:
            text = f"'{text}'" if key in ("l", "tr") else text
            separator = " " if label.endswith(".") else ": "
            out.append(f"{label}{separator}{text}" if with_labels else text)
    return "; ".join(out) or arguments[1]


def pronunciation(arguments: TemplateArguments) -> str:
    """{{IPA|[paʁi]}}, {{IPA|fr|paʁi}} and {{IPA-fr|paʁi}}: "[paʁi]". The name of the language is left out."""
    words = [word for word in arguments.positional() if word and not SOUND_FILE.fullmatch(word)]
    text = words[1] if len(words) > 1 and re.fullmatch(r"[a-z]{2,3}(?:-\w+)*", words[0]) else "".join(words[:1])
    is_delimited = (len(words) == 1 and not arguments["label"]) or text[:1] in "[/(⟨"
    return text if is_delimited or not text else f"[{text}]"


def english_pronunciation(arguments: TemplateArguments) -> str:
    """{{IPAc-en|lang|ˈ|l|ʌ|n|d|ən}}: "English: /ˈlʌndən/"."""
    words = [word for word in arguments.positional() if word and not SOUND_FILE.fullmatch(word)]
    labels = [ENGLISH_LABELS[word.lower()] for word in words if word.lower() in ENGLISH_LABELS]
    sounds = "".join(word.replace("_", " ") for word in words if word.lower() not in ENGLISH_LABELS)
    return " ".join([*labels, f"/{sounds}/"]) if sounds else ""


LANGUAGE_RULES: dict[str, TemplateRule] = {
    **dict.fromkeys(("zh", "lang-zh", "zh-cst", "zh-cp", "zh-tsp", "zh-stp"), chinese),
    **dict.fromkeys(("ipa", "ipa-all", "api", "ipalink", "ipaalink"), pronunciation),
    **dict.fromkeys(("ipablink", "phonetic"), lambda arguments: f"[{arguments[1]}]"),
    **dict.fromkeys(("ipaslink", "phonemic"), lambda arguments: f"/{arguments[1]}/"),
    "ipac-en": english_pronunciation,
    "respell": lambda arguments: "-".join(filter(None, arguments.positional())).replace("-_-", " "),
    "audio": lambda arguments: arguments[2],
}  # fmt: skip
