"""Arguments of a template."""

import re
from collections.abc import Callable, Sequence

ARGUMENT_NAME = re.compile(r"[\w -]{1,40}")


class TemplateArguments:
    """Arguments of a template by name, or by number from 1 on. A missing argument is empty."""

    def __init__(self, parts: Sequence[str]) -> None:
        self.values: dict[str, str] = {}
        self.count = 0
        for part in parts:
            name, equals, value = part.partition("=")
            if equals and ARGUMENT_NAME.fullmatch(name.strip()):
                self.values[name.strip()] = value.strip()
            else:
                self.count += 1
                self.values[str(self.count)] = part.strip()
        if "1" not in self.values:
            self.values["1"] = next(
                (self.values[key] for key in ("text", "quote", "content") if key in self.values), ""
            )

    def __getitem__(self, key: int | str) -> str:
        return self.values.get(str(key), "")

    def positional(self) -> list[str]:
        """The unnamed arguments, in order."""
        return [self[number] for number in range(1, self.count + 1)]


TemplateRule = Callable[[TemplateArguments], str]


MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
DECIMAL = re.compile(r"[-−+]?\d+(?:\.\d+)?")
TIMESTAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)T")
HEMISPHERES = ("N", "S", "E", "W", "O")  # O: east or west in other languages, as written there


def month_name(month: str) -> str:
    """The name of month 1 to 12, otherwise the argument itself."""
    return MONTHS[int(month) - 1] if month.isdecimal() and 1 <= int(month) <= 12 else month


def format_date(year: str, month: str, day: str, day_first: bool) -> str:
    """March 14, 1879 or 14 March 1879; month and day may be missing."""
    day = day.removeprefix("0") if month and day.isdecimal() else ""
    month = month_name(month)
    if day_first or not day:
        return " ".join(filter(None, (day, month, year)))
    return f"{month} {day}, {year}".rstrip(", ")


def page_variables(title: str, timestamp: str) -> dict[str, str]:
    """MediaWiki's variables, in lowercase. Today is the day of the revision: a page shows the day when it is read."""
    out = {"pagename": title, "fullpagename": title}
    if match := TIMESTAMP.match(timestamp):
        year, month, day = match.groups()
        values = {"year": year, "month": month, "monthname": month_name(month), "day": str(int(day)), "day2": day}
        out |= {prefix + name: value for prefix in ("current", "local") for name, value in values.items()}
    return out


def first_date(arguments: TemplateArguments) -> str:
    """{{birth date|1879|3|14}}: "March 14, 1879"; with df=yes "14 March 1879"; {{start date|1879}}: "1879"."""
    day_first = arguments["df"].lower() in ("y", "yes", "true", "1")
    return format_date(arguments[1], arguments[2], arguments[3], day_first)


def death_date_and_age(arguments: TemplateArguments) -> str:
    """{{death date and age|1955|4|18|1879|3|14}}: "April 18, 1955 (aged 76)"."""
    age = _years_between(arguments.positional()[3:6], arguments.positional()[:3])
    return first_date(arguments) + (f" (aged {age})" if age else "")


def age(arguments: TemplateArguments) -> str:
    """{{age|1961|8|4|2009|1|20}}: "47"; empty without the second date."""
    return _years_between(arguments.positional()[:3], arguments.positional()[3:6])


def _years_between(first: list[str], last: list[str]) -> str:
    if len(first) < 3 or len(last) < 3 or not all(part.isdecimal() for part in (*first, *last)):
        return ""
    (year, *birthday), (last_year, *last_day) = ([int(part[:9]) for part in date] for date in (first, last))
    return str(last_year - year - (last_day < birthday))


def old_style_date(arguments: TemplateArguments) -> str:
    """{{OldStyleDate|24 May|1819|13 May}}: "24 May [O.S. 13 May] 1819"."""
    return " ".join(filter(None, (arguments[1], f"[O.S. {arguments[3]}]" if arguments[3] else "", arguments[2])))


def coordinates(arguments: TemplateArguments) -> str:
    """{{coord|52|31|N|13|24|E}}: "52°31′N 13°24′E"; {{coord|44.1|-87.9}}: "44.1°N 87.9°W"; empty if only in the
    title."""
    if arguments["display"].strip(" ,").lower() in ("title", "t"):
        return ""
    angles: list[str] = []
    numbers: list[str] = []
    for word in arguments.positional():
        if DECIMAL.fullmatch(word) and len(numbers) < 3:
            numbers.append(word)
        elif word.upper() in HEMISPHERES and numbers:
            angles.append("".join(map("".join, zip(numbers, "°′″", strict=False))) + word.upper())
            numbers = []
        else:
            break
    if len(numbers) == 2 and not angles:
        for number, positive, negative in zip(numbers, "NE", "SW", strict=True):
            angles.append(f"{number.lstrip('-−+')}°{negative if number[0] in '-−' else positive}")
    return " ".join(angles[:2]) if len(angles) >= 2 else ""


def circa(arguments: TemplateArguments) -> str:
    """{{circa}}: "c."; {{circa|1900}}: "c. 1900"; {{circa|1900|1910}}: "c. 1900 – c. 1910"."""
    return " – ".join(f"c. {year}" for year in arguments.positional()[:2] if year) or "c."


DATE_RULES: dict[TemplateRule, str] = {
    first_date: "birth date, birth date and age, bda, dob, death date, start date, start date and age, end date, "
    "end date and age, release date, release date and age, film date, dts, date table sorting, birth year and age, "
    "launch date, birth date and given age, date",
    lambda arguments: arguments[1]: "birth-date, birth-date and age, death-date, death-date and age, start-date, "
    "end-date, bda2, death year and age, death year, birth year, birth based on age at death",
    death_date_and_age: "death date and age, dda, death date and given age",
    age: "age, age in years",
    old_style_date: "oldstyledate, oldstyledatedy, old style date",
    coordinates: "coord, coords, coordinates",
    circa: "circa, c., ca.",
}
"""Rules with the lowercase names of their templates."""


CHINESE_LABELS = {
    "c": "Chinese", "s": "simplified Chinese", "t": "traditional Chinese", "p": "pinyin", "tp": "Tongyong Pinyin",
    "w": "Wade–Giles", "j": "Jyutping", "cy": "Cantonese Yale", "sl": "Sidney Lau", "poj": "Pe̍h-ōe-jī",
    "tl": "Tâi-lô", "zhu": "Zhuyin Fuhao", "l": "lit.", "tr": "trans.",
}  # fmt: skip
"""The text that {{zh}} writes before each argument, in the order in which it shows them."""
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


LANGUAGE_RULES: dict[TemplateRule, str] = {
    chinese: "zh, lang-zh, zh-cst, zh-cp, zh-tsp, zh-stp",
    pronunciation: "ipa, ipa-all, api, ipalink, ipaalink",
    english_pronunciation: "ipac-en",
    lambda arguments: f"[{arguments[1]}]": "ipablink, phonetic",
    lambda arguments: f"/{arguments[1]}/": "ipaslink, phonemic",
    lambda arguments: "-".join(filter(None, arguments.positional())).replace("-_-", " "): "respell",
    lambda arguments: arguments[2]: "audio",
}
