"""The byte alphabet of GPT-2's vocabulary."""


def byte_to_char() -> dict[int, str]:
    """The printable character that stands for each byte in GPT-2's vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(rest)}
