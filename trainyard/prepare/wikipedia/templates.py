"""Templates that carry words of the sentence around them; without their text the sentence has a hole.

The definition of a template is in the dump, but expanding it takes most of a wiki engine. Templates that are not listed
here, above all citations and infoboxes, are dropped with their arguments.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from trainyard.prepare.wikipedia.template_rules import (
    DATE_RULES,
    LANGUAGE_RULES,
    TemplateArguments,
    TemplateRule,
    month_name,
    pronunciation,
)
from trainyard.prepare.wikipedia.text_layout import BLANK_CHARACTERS

TEXT_PATTERNS = {
    # readable text: the templates that show it, in lowercase; {1} is the first argument
    "{1}": "nowrap, nobr, no wrap, small, smaller, big, larger, em, strong, bold, italic, abbr, tooltip, vanchor, "
    "visible anchor, ill, interlanguage link, math, mvar, chem2, flag, flagcountry, angle bracket, angbr, sub, "
    "smallcaps, small caps, sc, not a typo, proper name, as written, columns-list, flatlist, plainlist, underline, "
    "u, nihongo2",
    "{2}": "lang, langx, langr, langue, script, color, colour, font color, font colour, resize",
    "\n{1}\n": "quote, blockquote, cquote, quotation, centered pull quote, pull quote, poem quote, poemquote",
    "fl. {1}": "floruit, fl.",
    "r. {1}": "reign, r.",
    "US${1}": "us$, usd",
    "£{1}": "gbp, £",
    "€{1}": "eur, €",
    "₹{1}": "inr, ₹",
    "¥{1}": "jpy, ¥",
    "{1} {2}": "unité, unidad",
    "{1} [sic]": "sic",
    "HMS {1}": "hms",
    "USS {1}": "uss",
    "SS {1}": "ss",
    "RMS {1}": "rms",
    "{1} {2} ": "ship",
    " ": "nbsp, space, spaces, thinsp, hair space, thin space",
    "–": "ndash, en dash, endash, –",
    " – ": "snd, spnd, spaced ndash, spaced en dash, dash",
    "—": "mdash, em dash, emdash, —",
    " · ": "·, dot, middot, bullet, •",
    "'": "', apostrophe",
    "'s": "'s",
    "|": "!",
    "=": "=",
    "π": "pi",
    "×": "times",
}

UNIT_NAMES = {
    "km2": "km²", "m2": "m²", "cm2": "cm²", "mi2": "sq mi", "sqmi": "sq mi", "sqkm": "km²", "sqft": "sq ft",
    "ft2": "sq ft", "sqm": "m²", "m3": "m³", "km3": "km³", "ft3": "cu ft", "cuft": "cu ft", "kph": "km/h",
    "km/h": "km/h", "C": "°C", "F": "°F", "K": "K", "acre": "acres", "mile": "miles", "foot": "feet", "LT": "long tons",
    "impgal": "imp gal", "USgal": "US gal", "nmi": "nautical miles", "kn": "knots",
}  # fmt: skip
RANGE_WORDS = {
    "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "+/-": " ± ", "-": "–", "–": "–",
}  # fmt: skip

NUMBER_PATTERN = re.compile(r"[-−+]?[\d.,/ ]+(?:e[-+]?\d+)?", re.IGNORECASE)
SUPERSCRIPT_NUMBER = re.compile(r"[-−+]?\d+")
SUPERSCRIPT_CHARACTERS = str.maketrans("0123456789-−+", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁻⁺")
PLACEHOLDER = re.compile(r"\{(\d)\}")


def pattern_rule(pattern: str) -> TemplateRule:
    """A rule that fills arguments into a pattern: {{circa|1900}} gives "c. 1900", {{circa}} gives "c."."""

    def rule(arguments: TemplateArguments) -> str:
        return PLACEHOLDER.sub(lambda match: arguments[match[1]], pattern).strip(" ")

    return rule if PLACEHOLDER.search(pattern) else lambda _: pattern


def convert(arguments: TemplateArguments) -> str:
    """{{convert|5|to|6|km|mi}}: "5 to 6 km". The value in the other unit is left out."""
    words = arguments.positional()

    def is_number(index: int) -> bool:
        return index < len(words) and NUMBER_PATTERN.fullmatch(words[index]) is not None

    text, index = "", 0
    while is_number(index):
        text += words[index]
        if index + 2 < len(words) and words[index + 1] in RANGE_WORDS:
            text += RANGE_WORDS[words[index + 1]]
        else:
            if index + 1 < len(words):
                text += " " + UNIT_NAMES.get(words[index + 1], words[index + 1])
            if not (index + 3 < len(words) and is_number(index + 2) and not is_number(index + 3)):
                break
            text += " "  # 5 ft 6 in
        index += 2
    return text


def superscript(text: str) -> str:
    """10{{sup|6}} is 10⁶, not 106; other text stays."""
    return text.translate(SUPERSCRIPT_CHARACTERS) if SUPERSCRIPT_NUMBER.fullmatch(text) else text


def power_of_ten(arguments: TemplateArguments) -> str:
    """1.5{{e|6}}: "1.5×10⁶"."""
    return f"×10{superscript(arguments[1])}" if arguments[1] else ""


def height(arguments: TemplateArguments) -> str:
    """{{height|m=1.85}}: "1.85 m"; {{height|ft=6|in=1}}: "6 ft 1 in"."""
    return " ".join(f"{arguments[unit]} {unit}" for unit in ("m", "cm", "ft", "in") if arguments[unit])


def fraction(arguments: TemplateArguments) -> str:
    """{{frac|2}}: 1/2; {{frac|3|4}}: 3/4; {{frac|1|3|4}}: 1 3/4."""
    words = arguments.positional()
    pattern = ("", "1/{0}", "{0}/{1}", "{0} {1}/{2}")[len(words)] if len(words) < 4 else ""
    return pattern.format(*words)


def format_value(arguments: TemplateArguments) -> str:
    """{{val|1.5|e=6|u=km}}: "1.5×10^6 km"."""
    power = f"×10^{arguments['e']}" if arguments["e"] else ""
    unit = arguments["u"] or arguments["ul"]
    return f"{arguments[1]}{power}{' ' + unit if unit else ''}" if arguments[1] else ""


def as_of(arguments: TemplateArguments) -> str:
    """{{as of|2019|5|4}}: "As of 4 May 2019"."""
    year, month, day = arguments[1], month_name(arguments[2]), arguments[3]
    first = "as of" if arguments["lc"] else "As of"
    return " ".join(filter(None, (arguments["alt"] or first, *(() if arguments["alt"] else (day, month, year)))))


def nihongo(arguments: TemplateArguments) -> str:
    """{{nihongo|English|kanji|romaji}}: "English (kanji, romaji)"."""
    inside = ", ".join(filter(None, (arguments[2], arguments[3])))
    return " ".join(filter(None, (arguments[1], f"({inside})" if inside else "")))


OTHER_RULES: dict[TemplateRule, str] = {
    convert: "convert, cvt",
    fraction: "frac, fraction, sfrac",
    format_value: "val",
    as_of: "as of",
    nihongo: "nihongo",
    height: "height",
    power_of_ten: "e",
    lambda arguments: superscript(arguments[1]): "sup, superscript",
    lambda arguments: arguments[arguments.count]: "transl, transliteration",
    lambda arguments: "".join(arguments.positional()): "chem, linktext, gaps",
    lambda arguments: ", ".join(filter(None, arguments.positional())): "hlist, unbulleted list",
}
TEMPLATE_RULES: dict[str, TemplateRule] = {
    name: rule
    for rules in (
        {pattern_rule(pattern): names for pattern, names in TEXT_PATTERNS.items()},
        OTHER_RULES,
        DATE_RULES,
        LANGUAGE_RULES,
    )
    for rule, names in rules.items()
    for name in names.split(", ")
}


def switch(words: Sequence[str]) -> str:
    """{{#switch: b | a | b = x | c = y | default}}: "x"."""
    is_chosen, default = False, ""
    for word in words[1:]:
        case, equals, text = word.partition("=")
        is_chosen = is_chosen or case.strip() == words[0]
        if equals and is_chosen:
            return text.strip()
        if equals and case.strip() == "#default":
            default = text.strip()
        elif not equals:
            default = word.strip()  # the last case without a text is the default
    return default


PARSER_FUNCTIONS: dict[str, Callable[[list[str]], str]] = {
    "#if": lambda words: (words[1] if words[0] else words[2]).strip(),
    "#ifeq": lambda words: (words[2] if words[0] == words[1].strip() else words[3]).strip(),
    "#switch": switch,
    "formatnum": lambda words: words[0],
    "lc": lambda words: words[0].lower(),
    "uc": lambda words: words[0].upper(),
    "lcfirst": lambda words: words[0][:1].lower() + words[0][1:],
    "ucfirst": lambda words: words[0][:1].upper() + words[0][1:],
}
"""Functions of MediaWiki's parser by name, called with the words after the colon."""


def expand_template(name: str, arguments: Sequence[str], variables: Mapping[str, str]) -> str:
    """The readable text of a template, of a parser function, or of a variable such as CURRENTYEAR; empty for others."""
    key = name.strip().replace("_", " ").lower()
    if rule := TEMPLATE_RULES.get(key):
        return rule(TemplateArguments(arguments))
    if key.startswith("lang-"):
        return TemplateArguments(arguments)[1]
    if key.startswith(("ipa-", "ipac-")):
        return pronunciation(TemplateArguments([key.partition("-")[2], *arguments]))
    function, colon, first = name.strip().partition(":")
    if colon and (call := PARSER_FUNCTIONS.get(function.lower())):
        first = first.strip(BLANK_CHARACTERS)
        return call([first, *arguments] if call is switch else [first, *arguments, "", "", ""])
    return variables.get(key, "")
