"""The data sets of AWS's guides to training on Trainium, by name."""

from dataclasses import dataclass

NEURON_BUCKET = "s3://neuron-s3/training_datasets"
HDF5 = f"{NEURON_BUCKET}/bert_pretrain_wikicorpus_tokenized_hdf5/bert_pretrain_wikicorpus_tokenized_hdf5"
GPT2_FILES = "https://s3.amazonaws.com/models.huggingface.co/bert"


@dataclass(frozen=True)
class NamedDataset:
    name: str
    sources: tuple[str, ...]
    size: str
    """For people, if the source does not answer; empty where the publishers do not tell."""
    license: str
    description: str
    next_command: str
    """The command of trainyard that uses it, with {dest} for its directory."""
    unpack: bool = False


DATASETS = {
    dataset.name: dataset
    for dataset in (
        NamedDataset(
            "wikicorpus",
            ("hf://datasets/gboleda/wikicorpus@refs/convert/parquet/raw_en/*",),
            "",
            "GFDL",
            "English Wikipedia of 2006 as Parquet files: the text of the Llama guides",
            "trainyard data pack '{dest}/raw_en/*/*.parquet' --output wiki-4k --seq-len 4096 --tokenizer OWNER/NAME",
        ),
        NamedDataset(
            "enwiki",
            ("https://dumps.wikimedia.org/enwiki/latest/enwiki-latest-pages-articles-multistream.xml.bz2",),
            "about 23 GiB",
            "CC BY-SA 4.0 and GFDL",
            "current dump of the English Wikipedia: the text of the GPT-3 guide",
            "trainyard data extract {dest}/enwiki-latest-pages-articles-multistream.xml.bz2 --output wiki",
        ),
        NamedDataset(
            "bert-hdf5-128",
            (f"{HDF5}_seqlen128.tar",),
            "",
            "CC BY-SA and GFDL, as Wikipedia",
            "masked sentence pairs of Wikipedia, 128 tokens: phase 1 of BERT",
            "trainyard train bert-large-phase1 'data.paths=[{dest}/*/*.hdf5]'",
            unpack=True,
        ),
        NamedDataset(
            "bert-hdf5-512",
            (f"{HDF5}_seqlen512.tar",),
            "",
            "CC BY-SA and GFDL, as Wikipedia",
            "masked sentence pairs of Wikipedia, 512 tokens: phase 2 of BERT",
            "trainyard train bert-large-phase2 'data.paths=[{dest}/*/*.hdf5]'",
            unpack=True,
        ),
        NamedDataset(
            "megatron-wikipedia",
            (
                *(f"{NEURON_BUCKET}/gpt/wikipedia/my-gpt2_text_document.{suffix}" for suffix in ("bin", "idx")),
                f"{NEURON_BUCKET}/gpt/wikipedia/license.txt",
                *(f"{GPT2_FILES}/gpt2-{name}" for name in ("vocab.json", "merges.txt")),
            ),
            "",
            "in license.txt",
            "English Wikipedia as Megatron token files, with GPT-2's vocabulary: the GPT-3 guide",
            "trainyard train gpt3-6.7b 'data.paths=[{dest}/my-gpt2_text_document]'",
        ),
    )
}
