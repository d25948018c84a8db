"""Words that had other names in earlier versions, so that files which name them still load."""

from __future__ import annotations

import re

RENAMED = {
    "Aged": "AgeDecayed",
    "Agreed": "PlusLayerMean",
    "Asked": "QuestionWindow",
    "AskedChannels": "QueryDrivenChannels",
    "AtArrival": "ConstantTrace",
    "Based": "InBasisCodec",
    "BasisCodec": "BoundBasis",
    "Beneath": "OutliersCodec",
    "Beside": "ResidualSpan",
    "Between": "ExtremesCodec",
    "Both": "ChainedWrappers",
    "Capacity": "ValueLeverage",
    "ChunkMates": "ChunkMass",
    "ChunkStays": "CurrentChunkFirst",
    "Covering": "TopP",
    "Cut": "ClippedCodec",
    "Decayed": "AccumulatedDecayedMass",
    "Drawn": "GumbelTopK",
    "Dropping": "FirstDroppingToken",
    "Encodable": "EncodingAccuracy",
    "EndsEnough": "NormPreserving",
    "FadingMass": "DecayedMass",
    "FewBounds": "LargestChannelBounds",
    "Filtered": "FilterProjection",
    "Fixed": "StaticAffine",
    "Full": "WhenFull",
    "HashLikeness": "HashSimilarity",
    "InChunks": "ChunkSum",
    "InPassages": "PassageMean",
    "InPhases": "PromptAndGenerated",
    "LastOfEach": "LastOfGroup",
    "LayerCovering": "LayerTopP",
    "Matched": "AttentionMatching",
    "MeanOfEach": "MeanOfGroup",
    "Merged": "MergedLayers",
    "Moved": "OrthogonalErrorCodec",
    "Narrow": "SelectivePropagation",
    "Nearest": "NearestLevel",
    "OfChannels": "ByChannelCodec",
    "OfEqualVariance": "BalancedCodec",
    "OfNormalTokens": "NormalisedCodec",
    "OfRange": "BoundStaticAffine",
    "OfRest": "PredictedCodec",
    "OfTokens": "ByTokenCodec",
    "OverPeak": "MaxNormalised",
    "Phased": "PrefillAndDecode",
    "PolicyLadder": "CheapestPolicy",
    "RawKeys": "UnrotatedKeys",
    "Received": "AccumulatedMass",
    "RepeatWithSensitivity": "RepeatWithGradients",
    "RepeatWithSizes": "RepeatWithNorms",
    "Rest": "PredictionError",
    "Retrieving": "RetrievalHeads",
    "Sampled": "SampleState",
    "Samples": "SampledAttention",
    "Scored": "TokenScore",
    "Shifted": "Offset",
    "Sized": "LengthAndDirection",
    "SizedQueries": "QueriesWithNorms",
    "Standing": "MergedFirst",
    "StatesOfThePast": "HiddenStateCache",
    "Surprise": "Surprisal",
    "Thinning": "TokenReduction",
    "Together": "MeanOverHeads",
    "TokensOf": "IsTokenType",
    "Told": "TokenProjection",
    "Uniformly": "RandomScore",
    "Viewers": "QueryCount",
    "Wanted": "PredictedAttention",
    "Written": "IsGenerated",
}
_OLD = re.compile(rf"\b({'|'.join(RENAMED)})(?=\()")


def with_new_names(key: str) -> str:
    """Rewrite the key of words (`kvjax.grammar.keys.key_of`) with the present names of the library's words.

    A key that contains a user's classes names all classes after " of ", the user's ones with their file;
    these are not renamed.

    >>> with_new_names("Received(observation=Mass(reduce='sum'))")
    "AccumulatedMass(observation=Mass(reduce='sum'))"
    >>> with_new_names("Cut(word=Clipped(share=0.5)) of mine.py:Cut, Clipped")
    'Cut(word=Clipped(share=0.5)) of mine.py:Cut, Clipped'
    """
    text, _, classes = key.partition(" of ")
    users = {name.rpartition(":")[-1] for name in classes.split(", ") if ":" in name}
    found = _OLD.sub(lambda m: m[0] if m[0] in users else RENAMED[m[0]], text)
    kept = [name if ":" in name else RENAMED.get(name, name) for name in classes.split(", ")]
    return f"{found} of {', '.join(kept)}" if classes else found
