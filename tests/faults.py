"""The table of `mutants`: by file, (name, old text, new text, tests…). An old text stands exactly once in its file.

A fault that changes nothing has, in place of tests, one entry that begins with ``= `` and says why.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, the tests that must notice it, and, if none can, the reason why it changes nothing."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    harmless: str = ""


# fmt: off
BLOCKS = "tests/cache/test_block_manager.py::"
HISTORIES = BLOCKS + "test_twenty_thousand_operations_with_prefix_hits_collisions_and_swapping"
PREFIXES = "tests/engine/test_prefix_cache.py::"
ENGINE = "tests/engine/test_engine.py::"
ANYHOW = ENGINE + "test_batch_chunks_and_preemption_change_nothing[4-params2]"  # n = 3
FAILURES = "tests/engine/test_failures.py::"
ABORTS = FAILURES + "test_aborts_at_every_step_give_every_block_back[False]"
DYNAMIC = "tests/engine/test_dynamic_rope.py"
BAD_WORDS = "tests/engine/test_bad_words.py"
LLM = "tests/engine/test_llm.py::"
BEAMS = "tests/beams/test_beam_search.py::"
SEARCH = "tests/beams/test_search.py"
THEIR_BEAMS = BEAMS + "test_the_same_beams_and_scores_as_transformers"
SWAPPED_BEAMS = BEAMS + "test_beams_survive_preemption[4-swap]"
PENALTIES = "tests/runner/test_penalties.py"
ROWS = "tests/runner/test_rows.py::"
AHEAD = ROWS + "test_running_ahead_changes_no_token"
STOP = "tests/text/test_stop.py::"
TOKENIZER = "tests/text/test_tokenizer.py::"
CHAT = "tests/text/test_chat_template.py::"
PARAMS = "tests/test_params.py"
LINE = "tests/parallel/test_tensor_parallel.py::"
SHARED = "tests/parallel/test_data_parallel.py::"
KERNELS = "tests/kernels/"

TABLE: dict[str, list[tuple[str, ...]]] = {
    # --- the cache ----------------------------------------------------------------------------------------------------
    "minillm/cache/block_manager.py": [
        ("fork-drops-a-reference", "for block in child.blocks:", "for block in child.blocks[1:]:",
         BLOCKS + "test_fork_shares_every_block"),
        ("fork-loses-the-salt", "child.salt = parent.salt", "child.salt = None", BLOCKS + "test_a_fork_keeps_the_salt"),
        ("fork-keeps-a-node-too-many", "parent.nodes[: num_tokens // self.block_size]",
         "parent.nodes[: -(-num_tokens // self.block_size)]",
         BLOCKS + "test_a_fork_keeps_the_nodes_of_its_full_blocks"),
        ("fork-at-a-border-takes-a-block-more", "parent.blocks[: -(-num_tokens // self.block_size)]",
         "parent.blocks[: num_tokens // self.block_size + 1]", HISTORIES),
        ("fork-leaves-the-parent-writable", "parent.writable = min(parent.writable, parent.num_tokens)", "pass",
         HISTORIES),
        ("copy-on-write-skipped", "self.ref_counts[table.blocks[-1]] > 1", "self.ref_counts[table.blocks[-1]] > 2",
         BLOCKS + "test_every_fill_level_copies_only_the_partly_filled_block"),
        ("full-tail-copied", "shared = partly_filled and", "shared = bool(table.blocks) and",
         BLOCKS + "test_every_fill_level_copies_only_the_partly_filled_block"),
        ("written-block-still-found", "and table.blocks[-1] in self.prefixes:", "and False:",
         BLOCKS + "test_a_block_that_its_last_owner_writes_to_is_found_no_more"),
        ("copy-of-a-block-not-copied-yet", "origin = self.content_of(source)", "origin = source",
         BLOCKS + "test_a_chain_of_forks_copies_from_the_first_source"),
        ("copy-source-handed-out", "if block not in self._copy_sources:", "if True:",
         BLOCKS + "test_a_copys_source_is_not_handed_out_before_the_copy_is_taken"),
        ("copy-reversed", "[(source, destination) for destination, source",
         "[(destination, source) for destination, source",
         BLOCKS + "test_a_copys_source_is_not_handed_out_before_the_copy_is_taken"),
        ("block-in-use-evicted", "self._cached.pop(block, None)", "pass", HISTORIES),
        ("latest-evicted-first", "block = next(iter(self._cached))", "block = next(reversed(self._cached))",
         BLOCKS + "test_hits_are_as_frequent_as_a_simple_oracle_says"),
        ("head-of-a-table-evicted-first", "for block in reversed(table.blocks):", "for block in table.blocks:",
         BLOCKS + "test_of_a_table_the_tail_is_evicted_first"),
        ("evicted-block-still-found", "self.prefixes.remove(block)\n        self._free.put", "self._free.put",
         HISTORIES),
        ("partly-filled-block-committed", "range(len(nodes), num_computed // size)",
         "range(len(nodes), -(-num_computed // size))", HISTORIES),
        ("chain-begins-without-its-salt", "nodes[-1] if nodes else table.salt", "nodes[-1] if nodes else None",
         PREFIXES + "test_salts_keep_users_apart"),
        ("whole-prompt-found", "self.prefixes.match(token_ids, salt, len(token_ids) - 1)",
         "self.prefixes.match(token_ids, salt, len(token_ids))",
         PREFIXES + "test_a_hit_on_the_whole_prompt_still_computes_the_last_token"),
        ("copy-not-counted-as-a-block", "if fresh + shared > self.num_free:", "if fresh > self.num_free:",
         BLOCKS + "test_out_of_blocks_changes_nothing"),
        ("nan-still-found", "if block in self.prefixes:\n                self", "if False:\n                self",
         PREFIXES + "test_nan_is_never_found_again"),
    ],
    "minillm/cache/free_blocks.py": [
        ("not-merged-with-the-run-before", "if block and self._is_free[block - 1]:",
         "if block > 1 and self._is_free[block - 1]:",
         BLOCKS + "test_runs_join_in_whatever_order_blocks_come_back"),
        ("not-merged-with-the-run-behind", "if block + 1 < len(self._is_free) and",
         "if block + 2 < len(self._is_free) and",
         BLOCKS + "test_runs_join_in_whatever_order_blocks_come_back"),
        ("new-sequence-at-the-edge-of-a-run", "start + (length - wanted) // 2, wanted)", "start, wanted)",
         BLOCKS + "test_growing_sequences_stay_in_one_run_while_the_pool_is_wide"),
        ("last-taken-block-stays-free", "self._is_free[first:end] = bytes(count)",
         'self._is_free[first:end] = bytes(count - 1) + b"\\x01"', BLOCKS + "test_fork_shares_every_block", HISTORIES),
    ],
    "minillm/cache/prefix_cache.py": [
        ("found-whatever-comes-before", "key = (before, tuple(token_ids))", "key = (None, tuple(token_ids))",
         BLOCKS + "test_a_block_is_found_behind_its_own_beginning_only"),
    ],
    "minillm/cache/swap.py": [
        ("saved-before-its-copy", "pairs = [(cache.content_of(block), home)", "pairs = [(block, home)", HISTORIES),
        ("host-overfilled", "if len(distinct) > len(self._free):", "if len(distinct) > len(self._free) + 1:",
         HISTORIES),
        ("block-not-brought-back", "[(h, d) for d, h in loads.items()]", "[(h, d) for d, h in loads.items()][1:]",
         HISTORIES),
        ("salt-lost-on-the-host", "cache.allocate(saved.seq_id, salt=saved.salt)", "cache.allocate(saved.seq_id)",
         BLOCKS + "test_a_salt_survives_the_host"),
        ("forks-more-than-was-saved", "min(common * size, saved.num_tokens, other.num_tokens)", "common * size",
         HISTORIES),
        ("shared-host-block-counted-once", "self._ref_counts[host] += 1", "self._ref_counts[host] = 1", HISTORIES),
        ("shared-host-block-freed-early", "if not self._ref_counts[host]:", "if True:", HISTORIES),
        ("saved-longer-than-computed", "hosts, tokens, table.salt)", "hosts, table.num_tokens, table.salt)", HISTORIES),
        ("copy-behind-a-return-forgotten", "return len(distinct) + len(seq_ids)", "return len(distinct)",
         "= it is a margin: the longest table comes first, so none is copied on its return, and `bring_back` asks for "
         "two blocks more for each sequence"),
    ],
    # --- scheduling ---------------------------------------------------------------------------------------------------
    "minillm/engine/scheduler.py": [
        ("one-sequence-too-many", "return self.max_num_seqs - sum(", "return self.max_num_seqs + 1 - sum(",
         ENGINE + "test_a_step_keeps_to_its_budget_and_its_seats"),
        ("one-token-too-many", "self.max_num_batched_tokens - len(schedule.decodes),",
         "self.max_num_batched_tokens + 1 - len(schedule.decodes),",
         ENGINE + "test_a_step_keeps_to_its_budget_and_its_seats"),
        ("prefill-not-counted", "budget -= chunk.count\n        return", "pass\n        return",
         ENGINE + "test_a_step_keeps_to_its_budget_and_its_seats"),
        ("admitted-prompt-not-counted", "budget -= chunk.count\n            seats", "pass\n            seats",
         ENGINE + "test_a_step_keeps_to_its_budget_and_its_seats"),
        ("group-takes-one-seat", "seats -= group.num_seqs", "seats -= 1",
         ENGINE + "test_a_step_keeps_to_its_budget_and_its_seats"),
        ("promise-forgotten", "promised += need.blocks_promised(group, size)", "pass",
         ENGINE + "test_two_requests_are_not_admitted_into_the_room_of_one"),
        ("oldest-preempted", "victim = self.running.pop()", "victim = self.running.pop(0)",
         ENGINE + "test_the_latest_is_preempted_and_comes_back_first"),
        ("preempted-group-lost", "self.waiting.appendleft(victim)", "pass", ANYHOW),
        ("preempted-group-goes-to-the-end", "self.waiting.appendleft(victim)", "self.waiting.append(victim)",
         ENGINE + "test_the_latest_is_preempted_and_comes_back_first"),
        ("preempted-group-computes",
         "schedule.decodes = [chunk for chunk in schedule.decodes if chunk.group not in gone]",
         "pass", ANYHOW, SWAPPED_BEAMS),
        ("preempted-group-grows", "elif not (preempted and group in preempted):", "else:", ANYHOW, SWAPPED_BEAMS),
        ("preempted-group-goes-on-with-its-prompt", "chunk.count > 0 and chunk.group not in schedule.preempted and",
         "chunk.count > 0 and", FAILURES + "test_aborts_at_every_step_give_every_block_back[False]", AHEAD + "[0]"),
        ("request-one-block-too-large", "if needed > self.cache.num_blocks - pinned:",
         "if needed > self.cache.num_blocks - pinned + 1:",
         ENGINE + "test_a_request_as_large_as_the_pool_is_taken_and_one_block_larger_is_not"),
        ("all-seats-are-too-many", "if n > self.max_num_seqs:", "if n >= self.max_num_seqs:",
         ENGINE + "test_a_request_as_large_as_the_pool_is_taken_and_one_block_larger_is_not"),
        ("admitted-one-block-too-early", "if needed + promised <= self.cache.num_free and",
         "if needed + promised <= self.cache.num_free + 1 and", ENGINE + "test_a_prompt_that_lacks_one_block_waits"),
        ("cached-blocks-counted-twice", "else cached.num_held", "else len(cached.blocks)",
         PREFIXES + "test_cached_blocks_of_a_prompt_are_no_room_for_it"),
        ("saved-group-comes-back-in-part", "budget < (group.num_seqs if group.stage is Stage.SAVED else 1)",
         "budget < 1",
         ENGINE + "test_a_saved_group_comes_back_as_a_whole"),
    ],
    "minillm/engine/admission.py": [
        ("next-token-needs-no-block", "-(-(length + 1) // block_size)", "-(-length // block_size)",
         "tests/engine/test_admission.py"),
        ("peak-of-the-last-only", "held + number * left", "held + left", "tests/engine/test_admission.py"),
        ("pinned-blocks-are-room", "<= cache.num_blocks - num_pinned", "<= cache.num_blocks",
         "tests/engine/test_admission.py"),
        ("promise-counts-what-is-held", "blocks_to_finish_prompt(group, block_size) - held",
         "blocks_to_finish_prompt(group, block_size)",
         "tests/engine/test_admission.py"),
        ("prompt-fills-the-context", "if len(token_ids) >= max_model_len:", "if len(token_ids) > max_model_len:",
         ENGINE + "test_prompts_at_the_edge_of_the_context"),
        ("first-id-beyond-the-vocabulary", "max(token_ids) >= vocab_size", "max(token_ids) > vocab_size",
         ENGINE + "test_bad_token_ids_are_refused_before_they_reach_the_device"),
        ("stop-id-beyond-the-vocabulary", "if any(token_id >= vocab_size", "if any(token_id > vocab_size", BAD_WORDS),
    ],
    "minillm/engine/idle.py": [
        ("parent-of-another-salt", "or parent.table.salt != salt", "", DYNAMIC),
        ("parents-last-token-shared", "min(parent.num_computed, len(ours) - 1)", "min(parent.num_computed, len(ours))",
         ENGINE + "test_a_held_sequence_gives_its_blocks_to_the_next_turn"),
        ("pinned-sequence-stays-idle", "self.idle.pop(sequence.seq_id)\n", "self.idle[sequence.seq_id]\n",
         PREFIXES + "test_a_pinned_prefix_survives_any_load"),
    ],
    "minillm/engine/preemption.py": [
        ("block-not-saved", "schedule.moves.out += pairs", "schedule.moves.out += pairs[1:]", SWAPPED_BEAMS),
        ("block-not-restored", "schedule.moves.back += pairs", "schedule.moves.back += pairs[1:]", SWAPPED_BEAMS),
        ("lost-tokens-not-computed-again", "sequence.num_computed = 0", "pass", ANYHOW),
        ("samples-begin-again-with-the-prompt", "leader.num_computed >= group.num_prompt_tokens",
         "leader.num_computed > group.num_prompt_tokens", ABORTS, AHEAD + "[0]"),
        ("host-blocks-leak", "self.swap.discard(sequence.seq_id)", "pass", ABORTS),
        ("returns-without-room", "while returning + 2 * len(seq_ids) + unsaved + promised >", "while returning >",
         ABORTS,
         AHEAD + "[0]"),
    ],
    # --- the engine ---------------------------------------------------------------------------------------------------
    "minillm/engine/requests.py": [
        ("aborted-request-keeps-its-blocks", "        self.retire(groups)", "        pass",
         ENGINE + "test_abort_at_any_step_returns_every_block"),
        ("output-twice", "self.finished.pop(request_id)", "self.finished[request_id]",
         ENGINE + "test_sample_i_is_the_same_for_any_n"),
        ("failed-request-fills-the-cache", "if table is not None and group.error is None:", "if table is not None:",
         "= by then `commit` has seen every full block of the known tokens, and begins behind them"),
        ("held-sequence-keeps-a-token-too-many", "if table.num_tokens > last and sequence.num_output_tokens:",
         "if False:",
         ROWS + "test_a_held_sequence_ends_where_its_tokens_end"),
        ("fork-computed-too-far", "child.num_computed = min(num_tokens, parent.num_computed)",
         "child.num_computed = parent.num_computed",
         "tests/engine/test_branch.py::test_what_is_rolled_back_holds_no_block"),
        ("just-beyond-the-trained-context", "num_prompt_tokens <= self.longest_plain_prompt",
         "num_prompt_tokens <= self.longest_plain_prompt + 1", DYNAMIC),
        ("longer-than-the-context", "self.max_model_len - len(token_ids)", "self.max_model_len - len(token_ids) + 1",
         ENGINE + "test_prompts_at_the_edge_of_the_context"),
    ],
    "minillm/engine/engine.py": [
        ("error-spreads", "[group for group in running if group.error is not None]",
         "running if any(group.error for group in running) else []",
         ENGINE + "test_a_request_whose_logits_are_nan_fails_alone"),
        ("broken-request-ends-twice", "if group.error is None and group.finished]", "if group.finished]",
         ENGINE + "test_a_request_whose_logits_are_nan_fails_alone"),
        ("tokens-lost-with-the-next-step", "self._undelivered = deltas\n", "pass\n",
         ROWS + "test_a_failure_between_two_steps_loses_no_finished_answer"),
        ("failed-step-found-in-the-cache", "self.cache.distrust(chunk.sequence.table)", "pass",
         FAILURES + "test_blocks_of_a_failed_step_are_not_found"),
        ("failed-step-ends-everybody", "self.requests.end(list(groups.values()))",
         "self.requests.end(list(self.requests.groups.values()))",
         ENGINE + "test_a_failing_device_ends_its_requests_and_nothing_else"),
        ("saved-in-a-failed-step", "self.scheduler.preemption.start_over(group)  #", "pass  #",
         FAILURES + "test_what_outlives_a_failure_has_its_own_tokens[False]"),
        ("rows-trusted-after-a-failure", "self.runner.forget()", "pass",
         FAILURES + "test_the_device_is_told_everything_after_a_failure"),
    ],
    "minillm/engine/samples.py": [
        ("two-samples-of-one-seed", "index * _SEED_STEP", "(index - 1) * _SEED_STEP",
         ENGINE + "test_samples_share_the_prompt_and_differ"),
        ("samples-share-their-text", "None if leader.text is None else leader.text.copy()", "leader.text",
         STOP + "test_samples_and_beams_end_by_the_rule[False]"),
        ("samples-draw-from-another-prompt", "each, 0, False, chunk.row)", "each, 0, False, 0)", ANYHOW),
        ("one-token-beyond-max-tokens", "if sequence.num_output_tokens >= group.max_tokens:",
         "if sequence.num_output_tokens > group.max_tokens:",
         ENGINE + "test_prompts_at_the_edge_of_the_context"),
        ("wasted-step", "total - sequence.num_prompt_tokens >= group.max_tokens",
         "total - sequence.num_prompt_tokens > group.max_tokens",
         ROWS + "test_the_next_step_is_launched_before_the_host_has_seen_this_one"),
        ("token-behind-the-end", "if sequence.finish_reason is not None:", "if False:", AHEAD + "[0]"),
        ("logprobs-do-not-add-up", "sequence.cumulative_logprob += logprobs.logprob",
         "sequence.cumulative_logprob = logprobs.logprob",
         ENGINE + "test_log_probabilities_are_the_models_own"),
    ],
    # --- beams --------------------------------------------------------------------------------------------------------
    "minillm/beams/method.py": [
        ("wrong-parent", "parent = choice.beams[candidate.beam]", "parent = choice.beams[0]", THEIR_BEAMS),
        ("dead-beam-keeps-its-blocks", "if sequence.seq_id not in taken:", "if False:", THEIR_BEAMS),
        ("beams-share-their-logprobs", "sequence.logprobs = parent.logprobs.copy()",
         "sequence.logprobs = parent.logprobs",
         BEAMS + "test_logprobs_of_beams_add_up"),
        ("stop-token-in-the-text", "in ids[:-1] if ended else ids:", "in ids:",
         "tests/engine/test_branch.py::test_a_stop_token_is_not_part_of_a_beams_text"),
        ("length-penalty-of-running-beams", "max(1, sequence.num_output_tokens) **",
         "max(1, sequence.num_output_tokens - 1) **",
         BEAMS + "test_an_aborted_search_scores_its_beams_by_their_length"),
        ("beams-worst-first", "found.sort(key=lambda entry: -entry[0])", "found.sort(key=lambda entry: entry[0])",
         THEIR_BEAMS),
    ],
    "minillm/beams/search.py": [
        ("finished-beam-from-below-the-width", "if rank < self.width:", "if rank <= self.width:", SEARCH),
        ("finished-beam-kept", "del self.finished[self.width :]", "del self.finished[self.width + 1 :]", SEARCH),
        ("length-penalty", "candidate.logprob / self.num_tokens**", "candidate.logprob / (self.num_tokens + 1) **",
         SEARCH),
        ("early-stopping-never-is-true", "or self.early_stopping is True:", "or self.early_stopping:", SEARCH),
        ("never-with-a-negative-penalty", '"never" and self.length_penalty > 0', '"never"', SEARCH),
        ("stops-when-the-best-is-not-reached", "<= self.finished[-1].score\n", "<= self.finished[0].score\n",
         SEARCH),
        ("too-few-candidates", "max(2, 1 + num_end_tokens) * self.width", "2 * self.width", SEARCH),
    ],
    "minillm/beams/candidates.py": [
        ("diversity-unpaid", "chosen.update(candidate.token_id for candidate in living)", "pass",
         BEAMS + "test_diverse_groups_match_a_plain_reference"),
        ("candidates-of-another-beam", "rows_of = (where // each).tolist()",
         "rows_of = (where // each).flip(1).tolist()", THEIR_BEAMS),
    ],
    # --- text ---------------------------------------------------------------------------------------------------------
    "minillm/text/stop.py": [
        ("partial-stop-string-shown", "- max(_overlap(", "- min(_overlap(",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("stop-string-shown", "self._release(end - len(self.matched))", "self._release(end)",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("stop-string-before-min-tokens", "self._immune + 1 - len(stop)", "self._immune - len(stop)",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("immune-for-too-long", "self._immune = max(0, self._immune - count)", "pass",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("shorter-of-two-stop-strings", "(at + len(stop), -len(stop), stop)", "(at + len(stop), len(stop), stop)",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("copies-share-what-is-shown", "self._shown.copy()", "self._shown",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("long-beginning-of-a-stop-string", "min(len(text), len(stop) - 1)", "min(len(text), len(stop) - 2)",
         STOP + "test_stop_strings_end_text_by_the_rule"),
        ("character-of-two-prompt-tokens", "if len(tail) >= 4:", "if len(tail) >= 1:",
         STOP + "test_a_prompt_may_end_within_a_character"),
        ("copy-forgets-half-a-character", "other._decoder.setstate(self._decoder.getstate())", "pass",
         STOP + "test_a_character_that_several_tokens_spell_comes_out_whole_in_every_copy"),
        ("first-space-of-the-answer-lost", "strip_space and not tail", "strip_space",
         TOKENIZER + "test_text_that_goes_on_from_a_prompt_keeps_its_first_space"),
    ],
    "minillm/text/token_bytes.py": [
        ("byte-of-another-character", "range(0xA1, 0xAD)", "range(0xA1, 0xAE)",
         TOKENIZER + "test_every_character_survives_a_round_trip"),
    ],
    "minillm/text/tokenizer.py": [
        ("user-types-a-control-token", "self._plain_ids(self._user_spellings.broken(text))", "self._ids(text)",
         TOKENIZER + "test_what_a_user_types_never_becomes_a_control_token"),
        ("turn-forged-by-the-user", 'if message["role"] == "assistant" else', 'if message["role"] != "assistant" else',
         CHAT + "test_what_the_assistant_thought_is_still_found_by_the_template"),
    ],
    # --- requests -----------------------------------------------------------------------------------------------------
    "minillm/params.py": [
        ("min-tokens-may-not-be-max-tokens", "if self.min_tokens > self.max_tokens:",
         "if self.min_tokens >= self.max_tokens:", PARAMS),
        ("top-p-of-zero", "1.0, 0.0, 1.0, above=True,", "1.0, 0.0, 1.0,", PARAMS),
        ("uneven-beam-groups", "if self.beam_width % self.num_beam_groups:", "if False:",
         BEAMS + "test_wrong_parameters_are_named"),
        ("bias-beyond-100", "min(100.0, max(-100.0, value))", "value", PARAMS),
    ],
    "minillm/checks.py": [
        ("true-is-an-integer", "isinstance(value, bool) or not isinstance(value, Integral)",
         "not isinstance(value, Integral)", PARAMS),
        ("bound-not-excluded", "or (above and plain == low)", "", PARAMS),
        ("nan-is-a-number", "if not low <= plain <= high or", "if plain < low or plain > high or", PARAMS),
    ],
    # --- from logits to tokens ----------------------------------------------------------------------------------------
    "minillm/runner/penalties.py": [
        ("end-one-token-too-early", "or sequence.num_output_tokens < params.min_tokens",
         "or sequence.num_output_tokens + 1 < params.min_tokens",
         PENALTIES),
        ("prompt-pays-for-its-tokens", "torch.tensor(sequence.output_token_ids, device=device)",
         "torch.tensor(sequence.token_ids, device=device)",
         PENALTIES),
        ("answer-alone-pays-for-repetition", "seen = torch.tensor(sequence.token_ids,",
         "seen = torch.tensor(sequence.output_token_ids or [0],",
         PENALTIES),
        ("penalty-as-a-reward", "values / penalty, values * penalty", "values / penalty, values / penalty",
         PENALTIES),
        ("last-run-may-repeat", "starts, tail = range(len(token_ids) - size + 1),",
         "starts, tail = range(len(token_ids) - size),",
         LLM + "test_no_run_of_tokens_comes_twice"),
        ("single-bad-word-allowed", "if len(word) == 1 or", "if", BAD_WORDS),
    ],
    "minillm/runner/sampler.py": [
        ("draw-at-another-position", "[draw.sequence.num_tokens for draw in draws]",
         "[len(draw.sequence.token_ids) for draw in draws]",
         AHEAD),
        ("logprobs-after-penalties", "kernels.log_probabilities(raw, token_ids) if wanted",
         "kernels.log_probabilities(processed, token_ids) if wanted",
         ENGINE + "test_log_probabilities_are_the_models_own"),
    ],
    # --- the device's rows --------------------------------------------------------------------------------------------
    "minillm/runner/rows.py": [
        ("row-of-an-old-table", "if row.table is not table:", "if row.table is None:", AHEAD + "[0]", AHEAD + "[1]",
         AHEAD + "[2]"),
        ("copied-block-not-told", "first = max(0, row.num_blocks - 1)", "first = row.num_blocks", AHEAD + "[0]"),
        ("copied-block-not-noticed", "or blocks[-1] != row.last_block:", "or False:", AHEAD + "[0]"),
        ("stale-position", "if row.position != sequence.num_computed:", "if row.position < 0:", AHEAD + "[0]",
         AHEAD + "[1]"),
        ("stale-token", "row.has_token = False  #", "pass  #",
         "= a draw follows every decode and sets it again, and beams, for which none is drawn, never set it"),
        ("rows-not-told", "same, self._told = rows == self._told, rows",
         "same, self._told = len(rows) == len(self._told), rows", AHEAD + "[0]"),
        ("stale-plan", "self._replan |= len(blocks)", "False and len(blocks)",
         "= a plan shares full blocks, and of a table only the last block is ever replaced, where it is partly filled"),
        ("seed-cut-in-half", "_signed(sequence.seed >> 32)", "0", AHEAD + "[0]"),
    ],
    "minillm/runner/runner.py": [
        ("wrong-slot", "* size + i % size for i in range(first, end)]",
         "* size + (i + 1) % size for i in range(first, end)]", ANYHOW),
        ("context-one-short", "context_lens=tensor(lengths,",
         "context_lens=tensor([max(1, length - 1) for length in lengths],", ANYHOW,
         ENGINE + "test_greedy_tokens_are_those_of_transformers"),
        ("single-copy-not-made", "if work.copies:", "if len(work.copies) > 1:", ANYHOW, SWAPPED_BEAMS),
        ("rope-of-the-position", "max(each.num_prompt_tokens, i + 1)", "i + 1", DYNAMIC),
    ],
    "minillm/runner/host_pool.py": [
        ("run-of-blocks-saved-in-part", "pool[host : host + count].copy_(staging[first : first + count]",
         "pool[host : host + 1].copy_(staging[first : first + 1]", SWAPPED_BEAMS),
    ],
    "minillm/runner/device_runner.py": [
        ("prompts-logits-of-another-row", "prefill.logit_rows + n)", "prefill.logit_rows)", AHEAD + "[0]"),
        ("prompt-counts-as-answer", "sequence.token_ids[: sequence.num_prompt_tokens])] = 1",
         "sequence.token_ids[: sequence.num_prompt_tokens])] = 2", AHEAD),
        ("rows-of-beams-taken-for-samples", "if len(draws) != draws[-1].row + 1:", "if False:", AHEAD),
        ("runs-ahead-of-the-hosts-penalties", "may_run_ahead=not hosted)", "may_run_ahead=True)", AHEAD, BAD_WORDS),
    ],
    # --- ranks --------------------------------------------------------------------------------------------------------
    "minillm/runner/wire.py": [
        ("wire-loses-the-decodes", "chunks, work.num_decodes]", "chunks, 0]", LINE + "test_a_step_survives_the_line"),
        ("wire-swaps-out-and-back", "HostMoves(*moves)", "HostMoves(*moves[::-1])",
         LINE + "test_a_step_survives_the_line"),
    ],
    "minillm/model/shard.py": [
        ("heads-of-another-kv-head", "first = kv_head * group", "first = kv_head * _length(owners)",
         LINE + "test_every_head_column_and_token_has_one_owner"),
        ("bias-added-by-every-rank", "return self.rank == 0 or not", "return True or not",
         LINE + "test_ranks_compute_what_one_rank_computes[biases-2]"),
    ],
    "minillm/parallel/shared_work.py": [
        ("request-beyond-the-last", "min(end, total))", "end)",
         SHARED + "test_nothing_beyond_the_last_is_handed_out"),
        ("broken-line-kept", 'known.rfind(b"\\n") + 1', "len(known)",
         SHARED + "test_parts_are_merged_in_order_and_a_broken_line_is_forgotten"),
    ],
    "minillm/model/rope.py": [
        ("dynamic-rope-without-its-power", "rope.theta * stretch ** (dim / (dim - 2))", "rope.theta * stretch",
         "tests/model/test_variants.py::test_dynamic_scaling_beyond_the_trained_context"),
        ("llama3-not-interpolated", "(1 - smooth) * scaled / rope.factor + smooth * scaled", "scaled",
         "tests/model/test_variants.py::test_variant_gives_the_logits_of_transformers"),
    ],
    # --- kernels: the specification and the CPU -----------------------------------------------------------------------
    "kernels/reference.py": [
        ("reference-mask", "<= query_positions[:, None]", "< query_positions[:, None]", KERNELS + "test_reference.py",
         KERNELS + "test_cpu_attention.py::test_prefill_attention"),
        ("reference-context-one-short", "softmax_scale, length - 1)", "softmax_scale, length - 2)",
         KERNELS + "test_reference.py",
         KERNELS + "test_cpu_attention.py::test_paged_attention"),
        ("reference-head-group", "v.repeat_interleave(group, 0)", "v.repeat(group, 1, 1)",
         KERNELS + "test_reference.py", KERNELS + "test_cpu_attention.py::test_paged_attention"),
        ("reference-top-k-one-more", "rank < torch.where(top_k > 0", "rank <= torch.where(top_k > 0",
         KERNELS + "test_cpu_sampling.py"),
        ("reference-top-p-one-less", "(before < top_p[:, None])", "(before + probabilities < top_p[:, None])",
         KERNELS + "test_cpu_sampling.py"),
        ("reference-min-p", "kept &= scaled >= torch.log(min_p)[:, None]", "kept &= scaled >= min_p[:, None] - 1",
         KERNELS + "test_cpu_sampling.py"),
        ("reference-seed-ignored", "_mix64(seeds + _as_signed(0x9E3779B97F4A7C15, 64))",
         "_mix64(0 * seeds + _as_signed(0x9E3779B97F4A7C15, 64))",
         ENGINE + "test_samples_share_the_prompt_and_differ"),
        ("reference-prompt-pays", "counts[row] > 0, counts[row] >> 1", "counts[row] > 0, counts[row]",
         KERNELS + "test_decode_rows.py"),
    ],
    "kernels/cpu/attention.py": [
        ("cpu-decode-one-token-more", "hidden = torch.arange(longest) >= lens[:, None]",
         "hidden = torch.arange(longest) > lens[:, None]",
         KERNELS + "test_cpu_attention.py"),
        ("cpu-decode-unscaled", "torch.bmm(query * softmax_scale,", "torch.bmm(query,",
         KERNELS + "test_cpu_attention.py"),
        ("cpu-padding-reads-unused-slots", "slots = torch.where(hidden, blocks[:, 0] * block_size, slots)", "pass",
         KERNELS + "test_cpu_attention.py"),
        ("cpu-prefill-mask", "mask = torch.arange(span.length) <= ", "mask = torch.arange(span.length) < ",
         KERNELS + "test_cpu_attention.py::test_prefill_attention"),
        ("cpu-prefill-mask-from-zero", "torch.arange(cached, span.length)[:, None]",
         "torch.arange(end - begin)[:, None]",
         KERNELS + "test_cpu_attention.py::test_prefill_attention"),
        ("cpu-rotation-backwards", "torch.stack((-places.sin, places.sin), dim=1)",
         "torch.stack((places.sin, -places.sin), dim=1)",
         KERNELS + "test_cpu_attention.py"),
    ],
    "kernels/cpu/sampling.py": [
        ("cpu-top-k-one-more", "kept = rank < torch.where(top_k > 0", "kept = rank <= torch.where(top_k > 0",
         KERNELS + "test_cpu_sampling.py"),
        ("cpu-top-p-excludes-the-first-above", "cut = (before >= top_p[:, None])",
         "cut = (before + probabilities >= top_p[:, None])", KERNELS + "test_cpu_sampling.py"),
        ("cpu-min-p-halved", "cut |= scaled < torch.log(min_p)[:, None]",
         "cut |= scaled < torch.log(min_p / 2)[:, None]", KERNELS + "test_cpu_sampling.py"),
        ("cpu-most-probable-may-be-cut", "(top_p < 1)[:, None] & (rank > 0)", "(top_p < 1)[:, None] & (rank > 1)",
         KERNELS + "test_cpu_sampling.py"),
        ("cpu-ties-decided-by-chance", "sure = (top_k > 0) & ~tied[:, 0]", "sure = top_k > 0",
         KERNELS + "test_cpu_sampling.py"),
    ],
    "kernels/cpu/linear.py": [
        ("float16-holds-less", "if largest <= 2**-23 *", "if largest <= 2**-13 *", KERNELS + "test_cpu_linear.py"),
        ("cpu-norm-without-eps", "/ row.shape[0] + eps) ** -0.5", "/ row.shape[0]) ** -0.5",
         KERNELS + "test_cpu_linear.py"),
    ],
    "kernels/prefix_plan.py": [
        ("partly-filled-block-shared", "if num_full[member] > depth else", "if num_full[member] >= depth else",
         KERNELS + "test_prefix_plan.py"),
        ("node-longer-than-common", "min(num_full[member] for member in members))",
         "max(num_full[member] for member in members))", KERNELS + "test_prefix_plan.py"),
    ],
    # --- kernels: Triton, interpreted ---------------------------------------------------------------------------------
    "kernels/decode_attention.py": [
        ("decode-head-group", "heads = kv_head * GROUP + rows", "heads = kv_head + rows * tl.num_programs(0)",
         KERNELS + "test_decode_attention.py::test_paged_attention_at_the_edges_of_blocks"),
        ("decode-unscaled", "tl.zeros([ROWS, TILE], tl.float32)) * scale_log2e", "tl.zeros([ROWS, TILE], tl.float32))",
         KERNELS + "test_decode_attention.py::test_paged_attention_at_the_edges_of_blocks"),
        ("decode-context-one-short", "end = tl.minimum(start + part, context)",
         "end = tl.minimum(start + part, context - 1)",
         KERNELS + "test_decode_attention.py::test_paged_attention_at_the_edges_of_blocks"),
        ("decode-sum-not-corrected", "total = total * correction + tl.sum(weights, axis=1)",
         "total = total + tl.sum(weights, axis=1)",
         KERNELS + "test_decode_attention.py"),
        ("decode-splits-unweighed", "out = tl.sum(partial * weights[:, None], axis=0)", "out = tl.sum(partial, axis=0)",
         KERNELS + "test_decode_attention.py"),
    ],
    "kernels/chunked_prefill.py": [
        ("prefill-mask", "(seen[None, :] <= positions[:, None])", "(seen[None, :] < positions[:, None])",
         KERNELS + "test_chunked_prefill.py"),
        ("prefill-unmasked-too-far", "unmasked_end = (first_position + 1) // TILE * TILE",
         "unmasked_end = (first_position + ROWS) // TILE * TILE",
         KERNELS + "test_chunked_prefill.py"),
        ("prefill-head-group", "kv_head = head // GROUP", "kv_head = head % (tl.num_programs(0) // GROUP)",
         KERNELS + "test_chunked_prefill.py"),
    ],
    "kernels/prefix_decode_attention.py": [
        ("tail-reads-what-is-shared", "begin = tl.load(tails_ptr + place)", "begin = tl.load(tails_ptr + place) * 0",
         KERNELS + "test_prefix_decode_attention.py::test_a_plan_holds_while_sequences_grow"),
        ("node-without-its-weight", "tl.store(lse_ptr + at, maximum + tl.log2(total), mask=is_row)",
         "tl.store(lse_ptr + at, maximum, mask=is_row)",
         KERNELS + "test_prefix_decode_attention.py::test_a_plan_holds_while_sequences_grow"),
        ("parts-of-a-node-in-one-place", "+ ordinal\n", "+ ordinal * 0\n", KERNELS + "test_prefix_decode_attention.py"),
    ],
    "kernels/decode_rows.py": [
        ("row-context-one-short", "tl.store(lens_ptr + i, position + 1)", "tl.store(lens_ptr + i, position)",
         KERNELS + "test_decode_rows.py"),
        ("row-table-one-short", "used = position // BLOCK_SIZE + 1", "used = position // BLOCK_SIZE",
         KERNELS + "test_decode_rows.py"),
        ("row-prompt-pays", "generated = count >> 1", "generated = count", KERNELS + "test_decode_rows.py"),
        ("row-token-counted-as-prompt", "other=0) + 2, mask=rows >= 0)", "other=0) + 1, mask=rows >= 0)",
         KERNELS + "test_decode_rows.py"),
    ],
    "kernels/sampling.py": [
        ("triton-top-p-one-less", "tl.sum(tl.where(above, weights, 0.0), axis=0) < top_p * total",
         "tl.sum(tl.where(above | (ids == token), weights, 0.0), axis=0) < top_p * total",
         KERNELS + "test_sampling.py::test_each_cut_keeps_just_what_it_should"),
        ("triton-min-p-without-its-temperature", "enough = (x - anchor) / temperature >= least",
         "enough = x - anchor >= least",
         KERNELS + "test_sampling.py::test_each_cut_keeps_just_what_it_should"),
    ],
    "kernels/scan.py": [
        ("triton-seed", "tl.load(positions_ptr + row), ids)", "tl.load(positions_ptr + row) + 1, ids)",
         KERNELS + "test_sampling.py::test_sampling_draws_what_the_reference_draws"),
        ("triton-tokens-beyond-the-vocabulary", 'ids, mask=ids < vocab, other=float("-inf")',
         "ids, mask=ids < vocab, other=0.0",
         KERNELS + "test_sampling.py::test_sampling_draws_what_the_reference_draws"),
    ],
    "kernels/top_k.py": [
        ("triton-top-k-one-less-of-equals", "axis=0) <= missing)", "axis=0) < missing)", KERNELS + "test_top_k.py"),
        ("triton-higher-id-first", "(ids[:, None] < ids[None, :])", "(ids[:, None] > ids[None, :])",
         KERNELS + "test_top_k.py"),
    ],
    "kernels/rotary.py": [
        ("triton-rotation-backwards", "return first * cos - second * sin, second * cos + first * sin",
         "return first * cos + second * sin, second * cos - first * sin",
         KERNELS + "test_rotary.py"),
        ("triton-v-in-part", "tl.store(v_out + HALF + pairs[None, :], tl.load(v_in + HALF +",
         "tl.store(v_out + HALF + pairs[None, :], tl.load(v_in +", KERNELS + "test_rotary.py"),
    ],
    "kernels/norm.py": [
        ("triton-norm-by-its-tile", "axis=0) / SIZE + eps)", "axis=0) / TILE + eps)", KERNELS + "test_norm.py"),
    ],
    "kernels/activation.py": [
        ("triton-gate-and-up-swapped", "silu = (gate * tl.sigmoid(gate))",
         "silu = (gate * tl.sigmoid(up.to(tl.float32)))", KERNELS + "test_activation.py"),
    ],
    "kernels/matvec.py": [
        ("triton-matvec-norm", "axis=0 if TOKENS == 1 else 2) / num_columns + eps",
         "axis=0 if TOKENS == 1 else 2) / COLUMNS + eps",
         KERNELS + "test_matvec.py::test_matvec[3-22-2100-True-dtype0]"),
        ("triton-matvec-bias-of-the-gate", "tl.load(bias_ptr + num_rows + rows,", "tl.load(bias_ptr + rows,",
         KERNELS + "test_matvec.py::test_matvec[3-22-2100-True-dtype0]"),
    ],
    "kernels/blocks.py": [
        ("triton-last-word-not-copied", "mask = offsets < words", "mask = offsets < words - 1",
         KERNELS + "test_blocks.py"),
    ],
}
# fmt: on

FAULTS = [
    Fault(name, file, old, new, (), rest[0].removeprefix("= "))
    if rest[0].startswith("= ")
    else Fault(name, file, old, new, tuple(rest))
    for file, entries in TABLE.items()
    for name, old, new, *rest in entries
]
