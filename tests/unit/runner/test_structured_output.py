"""Masks allow exactly the tokens with which an answer can still get the form that was asked for."""

import json
from random import Random
from typing import Any

import numpy as np
import pytest
import regex
import torch
from tokenizers import Tokenizer

from triptych.demo import CHECKPOINT
from triptych.errors import RequestError
from triptych.output import ModelRunnerOutput, NewRequestData
from triptych.runner.request_state import RequestState
from triptych.runner.structured_output import MAX_COMPILED, NO_MASKS, GrammarCompiler, GrammarMatchers
from triptych.sampling_params import SamplingParams, StructuredOutput

VOCAB, EOS, PROMPT = 1024, (2, 0), (50, 51, 52)
AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "b" | ""'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
STRUCTURES = (
    StructuredOutput("regex", "(a|b)*abb"),
    StructuredOutput("json_schema", json.dumps(SCHEMA)),
    StructuredOutput("json_object"),
    StructuredOutput("choice", '["red", "red circle", "blau \\u00e9"]'),
    StructuredOutput("grammar", 'root ::= "x" | "(" root ")"'),
    StructuredOutput("grammar", 'start: "x" | "(" start ")"'),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(CHECKPOINT, VOCAB)


@pytest.fixture
def matchers(compiler: GrammarCompiler) -> GrammarMatchers:
    return GrammarMatchers(compiler)


def request(structure: StructuredOutput | None, *answer: int, **sampling: Any) -> RequestState:
    settings: dict[str, Any] = {"max_tokens": 500, "stop_token_ids": EOS, **sampling}
    params = SamplingParams(structured_output=structure, **settings)
    data = NewRequestData("r", (*PROMPT, *answer), (), params, len(PROMPT), 0, ())
    return RequestState(data, np.zeros((1, len(PROMPT)), np.int64), 0, 0)


def allowed(matchers: GrammarMatchers, state: RequestState, vocab_size: int = VOCAB) -> set[int] | str:
    """The ids that may come next; or what the runner says instead."""
    output = ModelRunnerOutput()
    masked = matchers.masks([state], output).apply(torch.zeros(1, vocab_size))
    if output.refused_requests:
        return output.refused_requests["r"]
    return "complete" if output.completed else set(masked[0].isfinite().nonzero().flatten().tolist())


def id_of(text: str, tokenizer: Tokenizer) -> int:
    (token_id,) = tokenizer.encode(text, add_special_tokens=False).ids
    return token_id


def append(matchers: GrammarMatchers, state: RequestState, token_id: int) -> bool:
    """Whether the answer is complete with it."""
    output = ModelRunnerOutput()
    state.append_token(token_id)
    matchers.append(state, token_id, output)
    return output.completed == {"r"}


@pytest.mark.parametrize(
    "pattern",
    ("[ab]{2,4}c?", "(red|blue|a big red) (circle|square)s?", r"-?(0|[1-9][0-9]{0,5})(\.[0-9]+)?", "(a|b)*abb", "(the )+end"),
)
def test_a_mask_allows_just_the_tokens_that_keep_a_match_within_reach(
    pattern: str, tokenizer: Tokenizer, matchers: GrammarMatchers
) -> None:
    """Against the package `regex`, which knows partial matches, over the whole vocabulary at each step of random answers."""
    num_free = 0
    texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in range(VOCAB)]
    for seed in range(4):
        random, state, text, is_complete = Random(seed), request(StructuredOutput("regex", pattern)), "", False
        for _ in range(10):
            wanted = {i for i in range(7, VOCAB) if regex.fullmatch(pattern, text + texts[i], partial=True)}
            matches = regex.fullmatch(pattern, text) is not None
            assert is_complete == (matches and not wanted)
            if is_complete:
                break
            now = allowed(matchers, state)
            assert isinstance(now, set)
            if (
                not matches and len({texts[i][0] for i in wanted}) == 1
            ):  # forced: spelt as the tokenizer would, and in no other way
                assert now
                assert now <= wanted
            else:
                assert now == wanted | (set(EOS) if matches else set())
                num_free += 1
            token_id = random.choice(sorted(now - set(EOS)))
            text += texts[token_id]
            is_complete = append(matchers, state, token_id)
    assert num_free


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.kind)
def test_a_matcher_made_anew_from_the_answer_so_far_allows_what_the_grown_one_allows(
    structure: StructuredOutput, compiler: GrammarCompiler
) -> None:
    """After a hand-over, a preemption or a replay; also where all that was lost is the news that the answer is complete."""
    grown, random, state, answer = GrammarMatchers(compiler), Random(3), request(structure), list[int]()
    for _ in range(40):
        now = allowed(grown, state)
        assert isinstance(now, set)
        assert now
        assert allowed(GrammarMatchers(compiler), request(structure, *answer)) == now
        answer.append(random.choice(sorted(now - set(EOS)) or [0]))
        if answer[-1] == 0:
            break
        if append(grown, state, answer[-1]):
            assert allowed(GrammarMatchers(compiler), request(structure, *answer)) == "complete"
            break


def test_neighbours_without_a_form_keep_their_logits_and_a_batch_without_any_is_not_copied(matchers: GrammarMatchers) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    masks = matchers.masks([request(None), request(STRUCTURES[0]), request(None)], ModelRunnerOutput())
    masked = masks.apply(logits)
    assert torch.equal(logits, before), "the model's own distribution stays for logprobs"
    assert torch.equal(masked[[0, 2]], before[[0, 2]])
    kept = masked[1].isfinite()
    assert 0 < kept.sum() < 20
    assert torch.equal(masked[1][kept], before[1][kept])
    assert matchers.masks([request(None)] * 2, ModelRunnerOutput()) is NO_MASKS
    assert NO_MASKS.apply(logits) is logits


def test_an_answer_that_may_end_is_ended_by_the_requests_own_stop_tokens(tokenizer: Tokenizer, matchers: GrammarMatchers) -> None:
    a, b = (id_of(text, tokenizer) for text in "ab")
    pattern = StructuredOutput("regex", "a+")

    def after_a(**sampling: Any) -> set[int] | str:
        return allowed(matchers, request(pattern, a, **sampling))

    wanted = {i for i in range(7, VOCAB) if set(tokenizer.decode([i])) == {"a"}}
    assert after_a() == wanted | {0, 2}
    assert after_a(stop_token_ids=()) == wanted, "with ignore_eos the form ends it, or max_tokens"
    assert after_a(stop_token_ids=(b, 2, -1, VOCAB)) == wanted | {b, 2}


def test_only_ordinary_tokens_of_the_tokenizer_are_allowed_though_the_models_vocabulary_is_larger(tokenizer: Tokenizer) -> None:
    padded = GrammarMatchers(GrammarCompiler(CHECKPOINT, VOCAB + 100))
    state = request(StructuredOutput("regex", r"(?s:.)+"))
    now = allowed(padded, state, VOCAB + 100)
    assert isinstance(now, set)
    append(padded, state, id_of("a", tokenizer))
    assert allowed(padded, state, VOCAB + 100) == now | set(EOS), "that it may end is no token of the model's"
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    assert not now & special
    assert max(now) < VOCAB
    assert {tokenizer.token_to_id(text) for text in "aZ9}"} <= now


@pytest.mark.parametrize(
    ("structure", "sentence"),
    [
        (StructuredOutput("regex", "a("), "the regex cannot be used: unclosed group."),
        (StructuredOutput("regex", "(?=a)b"), "the regex cannot be used: look-around, .* is not supported."),
        (StructuredOutput("json_schema", '{"type": "objekt"}'), "the json_schema cannot be used: Invalid type: objekt."),
        (StructuredOutput("json_schema", "{"), "the json_schema cannot be used: "),
        (StructuredOutput("json_schema", '{"$ref": "http://10.0.0.1/x"}'), "the json_schema cannot be used: .* does not fetch"),
        (StructuredOutput("json_schema", '{"not": {"type": "string"}}'), 'the json_schema cannot be used: .*"not"'),
        (StructuredOutput("json_schema", '{"enum": []}'), "the json_schema cannot be used: Unsatisfiable"),
        (StructuredOutput("grammar", "start: foo"), 'the grammar cannot be used: .*unknown name: "foo"'),
        (StructuredOutput("grammar", "root ::= (((("), "the grammar cannot be used: .*Expected"),
        (StructuredOutput("grammar", "start: " + "(" * 20_000), "the grammar cannot be used: .*nested"),
        (StructuredOutput("regex", "(" * 20_000 + ")" * 20_000), "the regex cannot be used: .*nest"),
    ],
)
def test_what_cannot_be_used_is_the_clients_mistake_in_one_sentence(
    structure: StructuredOutput, sentence: str, compiler: GrammarCompiler
) -> None:
    for _ in range(2):  # it is remembered as what it is
        with pytest.raises(RequestError, match=sentence) as caught:
            compiler.start(structure)
        assert "\n" not in caught.value.message
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("structure", [StructuredOutput("regex", "(a{1000}){1000}"), StructuredOutput("grammar", AMBIGUOUS)])
def test_a_grammar_that_grows_without_end_is_refused_on_its_way_and_its_neighbour_goes_on(
    structure: StructuredOutput, tokenizer: Tokenizer, matchers: GrammarMatchers
) -> None:
    a = id_of("a", tokenizer)
    costly, neighbour = request(structure), request(StructuredOutput("regex", "a+"))
    neighbour.request_id = "n"
    output = ModelRunnerOutput()
    for _ in range(500):
        output = ModelRunnerOutput()
        masks = matchers.masks([costly, neighbour], output)
        assert masks.allowed[1][a]
        if output.refused_requests:
            break
        for state in (costly, neighbour):
            state.append_token(a)
            matchers.append(state, a, output)
    assert list(output.refused_requests) == ["r"]
    assert f"the {structure.kind} cannot be used: " in output.refused_requests["r"]


def test_an_answer_so_far_that_has_another_form_ends_its_request_alone(tokenizer: Tokenizer, matchers: GrammarMatchers) -> None:
    b = id_of("b", tokenizer)
    said = allowed(matchers, request(StructuredOutput("regex", "a+"), b))
    assert said == "the answer so far does not have the form of its regex."


async def test_the_last_grammars_are_kept_and_no_more() -> None:
    compiler = GrammarCompiler(CHECKPOINT, VOCAB)
    for number in range(MAX_COMPILED + 3):
        await compiler.check(StructuredOutput("regex", f"a{{{number + 1}}}"))
        await compiler.check(StructuredOutput("regex", "used again and again"))
    kept = compiler._compiled  # pyright: ignore[reportPrivateUsage]
    assert len(kept) == MAX_COMPILED
    assert StructuredOutput("regex", "used again and again") in kept
    compiler.close()
