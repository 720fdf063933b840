"""Sentence splitting by rules, without a trained model: no download, and the same result on every machine.

A line end ends a sentence. Within a line, each stop is judged by what precedes it (an abbreviation, an initial) and
what follows (a lowercase letter continues the sentence). The rules are written for English; other scripts are split at
their own stops. The time is linear in the length of the text, whatever its content.
"""

import re

OPENERS = "\"'“‘«‹([{¿¡„「『（【《"
CLOSERS = "\"'”’»›)\\]}」』）】》"
STOPS_WITHOUT_SPACE = frozenset("。！？｡")
"""Stops that end a sentence without a space after them."""
STOP_RUN = re.compile(rf"([.!?…‥।॥؟۔።։。！？｡]++[{CLOSERS}]*+(?:\[\d{{1,4}}\])*+)(\s*+)")
"""A run of stops with closing quotes, brackets and note marks such as [12], and the space after it. Possessive
quantifiers keep a megabyte of dots from causing backtracking."""
WORD = re.compile(r"\w+")
DOTTED_ABBREVIATION = re.compile(r"(?:[^\W\d_]{1,2}\.)+[^\W\d_]{1,2}")
"""U.S, a.m, Ph.D: without the last stop."""
MAX_ABBREVIATION = 12
"""Characters."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


NEVER_FINAL = _word_set("""
    mr mrs ms mx messrs mme mlle dr drs prof st ste mt ft gen sen rep gov pres lt col maj cmdr capt cpt sgt cpl adm rev
    fr hon msgr supt insp e.g i.e eg ie cf vs viz approx ca esp incl resp
""")
"""A stop after these never ends a sentence."""
SOMETIMES_FINAL = _word_set("""
    inc corp ltd co bros llc plc dept univ assn jr sr esq etc al no nos vol vols fig figs eq eqs sec secs ch chap p pp
    ed eds op ave blvd rd jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat
    lb lbs oz est trans
""")
"""A stop after these ends a sentence if the next word is a typical sentence starter."""
SENTENCE_STARTERS = _word_set("""
    a after all also although an and another any are as at because before both but by can despite did do does during
    each even every few first for from had has have he her here his how however i if in instead is it its later many
    meanwhile more most my no not now of on once one only or other our over perhaps since she so some still such that
    the their then there therefore these they this those though thus to two under until was we were what when where
    whether which while who why will with without would yes yet you your
""")


def split_sentences(text: str, keep_newlines: bool = False) -> list[str]:
    """The sentences without surrounding white space. With `keep_newlines`, each keeps the white space that follows it,
    so that the sentences joined are the text."""
    spans: list[str] = []
    for line in text.splitlines(keepends=True):
        start = 0
        for match in STOP_RUN.finditer(line):
            end = match.end()
            if end < len(line) and _ends_sentence(line, start, match):
                spans.append(line[start:end])
                start = end
        spans.append(line[start:])
    if keep_newlines:
        return _attach_whitespace(spans)
    return [sentence for span in spans if (sentence := span.strip())]


def _ends_sentence(line: str, start: int, match: re.Match[str]) -> bool:
    """True if the sentence from `start` ends with these stops. The line continues after them."""
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
    stop = match.start()
    words = line[max(start, stop - MAX_ABBREVIATION) : stop].split()
    word = words[-1].lstrip(OPENERS) if words else ""
    if word.isdecimal() and not line[start : stop - len(word)].strip():
        return False  # the number of a heading or list item
    if word.lower() in NEVER_FINAL:
        return False
    if word.lower() in SOMETIMES_FINAL or DOTTED_ABBREVIATION.fullmatch(word) or (len(word) == 1 and word.isupper()):
        following = WORD.match(line, after)
        if not following or line[following.end() : following.end() + 1] == ".":
            return False  # another initial: I. or A.
        return following[0].lower() in SENTENCE_STARTERS
    return True


def _attach_whitespace(spans: list[str]) -> list[str]:
    """Join spans of white space to the span before, or at the start of the text to the first sentence."""
    sentences: list[str] = []
    leading = ""
    for span in spans:
        if not span.isspace():
            sentences.append(leading + span)
            leading = ""
        elif sentences:
            sentences[-1] += span
        else:
            leading += span
    return sentences
