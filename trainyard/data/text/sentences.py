"""Sentences of a text by rules, without a trained model: nothing to download, the same everywhere.

A line ends a sentence. Within a line every stop is looked at: what stands before it (an abbreviation, an initial) and
what comes after it (a small letter goes on with the sentence). Written with English in mind; other scripts are cut at
their own stops. Each text is passed over once, whatever it holds.
"""

import re

OPENERS = "\"'“‘«‹([{¿¡„「『（【《"
CLOSERS = "\"'”’»›)\\]}」』）】》"
STOPS_WITHOUT_SPACE = frozenset("。！？｡")
"""Stops that need no space after them."""
STOP_RUN = re.compile(rf"([.!?…‥।॥؟۔።։。！？｡]++[{CLOSERS}]*+(?:\[\d{{1,4}}\])*+)(\s*+)")
"""A run of stops, with closing quotes and brackets and the marks of notes ([12]), and the space after it. All of it is
taken at once and never looked at again, so that a megabyte of dots is no trap."""
WORD = re.compile(r"\w+")
DOTTED_ABBREVIATION = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
"""U.S, a.m, Ph.D: the last stop is put aside."""
MAX_ABBREVIATION = 12
"""Characters of an abbreviation."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEVER_FINAL = _word_set("""
    mr mrs ms mx messrs mme mlle dr drs prof st ste mt ft gen sen rep gov pres lt col maj cmdr capt cpt sgt cpl adm rev
    fr hon msgr supt insp e.g i.e eg ie cf vs viz approx ca esp incl resp
""")
"""Stop after them: never the end of a sentence."""
SOMETIMES_FINAL = _word_set("""
    inc corp ltd co bros llc plc dept univ assn jr sr esq etc al no nos vol vols fig figs eq eqs sec secs ch chap p pp
    ed eds op ave blvd rd jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat
    lb lbs oz est trans
""")
"""Stop after them: the end where a word comes next that likes to begin a sentence."""
SENTENCE_STARTERS = _word_set("""
    a after all also although an and another any are as at because before both but by can despite did do does during
    each even every few first for from had has have he her here his how however i if in instead is it its later many
    meanwhile more most my no not now of on once one only or other our over perhaps since she so some still such that
    the their then there therefore these they this those though thus to two under until was we were what when where
    whether which while who why will with without would yes yet you your
""")


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences, without the white space around them; with `keep_newlines` each has all that follows it, so that
    joined they are the text again."""
    found: list[str] = []
    for line in text.splitlines(keepends=True):
        start = 0
        for match in STOP_RUN.finditer(line):
            end = match.end()
            if end < len(line) and _ends_sentence(line, start, match):
                found.append(line[start:end])
                start = end
        found.append(line[start:])
    if keep_newlines:
        return _attach_whitespace(found)
    return [sentence for part in found if (sentence := part.strip())]


def _ends_sentence(line: str, start: int, match: re.Match[str]) -> bool:
    """Whether the sentence that began at `start` ends with these stops; there is more of the line after them."""
    stops, space = match.groups()
    if not STOPS_WITHOUT_SPACE.isdisjoint(stops):
        return True
    if not space:
        return False
    after = match.end()
    while after < len(line) and line[after] in OPENERS:
        after += 1
    if after < len(line) and line[after].islower():
        return False
    if stops[0] != "." or stops[1:2] in (".", "?", "!"):
        return True
    begin = match.start()
    words = line[max(start, begin - MAX_ABBREVIATION) : begin].split()
    word = words[-1].lstrip(OPENERS) if words else ""
    if word.isdecimal() and not line[start : begin - len(word)].strip():
        return False  # numbers a heading or an item of a list
    if word.lower() in NEVER_FINAL:
        return False
    if word.lower() in SOMETIMES_FINAL or DOTTED_ABBREVIATION.fullmatch(word) or (len(word) == 1 and word.isupper()):
        following = WORD.match(line, after)
        if not following or line[following.end() : following.end() + 1] == ".":
            return False  # another initial: I. or A.
        return following[0].lower() in SENTENCE_STARTERS
    return True


def _attach_whitespace(parts: list[str]) -> list[str]:
    """Parts of white space joined to the one before, or to the first with anything else."""
    found: list[str] = []
    lead = ""
    for part in parts:
        if not part.isspace():
            found.append(lead + part)
            lead = ""
        elif found:
            found[-1] += part
        else:
            lead += part
    return found
