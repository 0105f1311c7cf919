"""Slow tests: those that `pytest` leaves out where neither --all nor a file is given.

What stays are the unit tests, and a real build of each law and layout.
"""

from __future__ import annotations

SLOW = (
    "tests/slurm/",
    "tests/storage/",
    "tests/trainers/",
    "tests/unit/encode/pixels/test_scaling.py",
    "tests/unit/encode/test_out_of_memory.py",
    "tests/unit/test_bench.py",
    "tests/unit/test_damage.py",
    "tests/unit/test_project.py::test_an_environment_has_the_imports_of_its_jobs",
    "tests/unit/trainers/sdscripts/test_strategies.py",
    "tests/unit/trainers/loop/test_launch.py::test_a_training_that_chooses",
    "tests/unit/trainers/sd/test_checkpoints.py",
    "tests/unit/trainers/sd/test_sd_lora_files.py",
    "tests/unit/trainers/sd/test_stopped.py",
    "tests/unit/trainers/sd/test_train.py",
    "tests/unit/trainers/wan/test_generate.py",
    "tests/workflow/",
)
"""Beginnings of the names of slow tests, each a folder, a module or a function."""


QUICK = (
    "tests/workflow/test_bad_input.py::test_bad_items_can_be_set_aside",
    "tests/workflow/test_bad_input.py::test_every_damaged_item_is_named",
    "tests/workflow/test_build_command.py::test_a_build_shows_the_plan",
    "tests/workflow/test_check.py::test_caches_are_counted",
    "tests/workflow/test_cluster.py::test_a_profile_asks_no_cluster_for_a_dry_run",
    "tests/workflow/test_cluster.py::test_a_source_edited_after_the_plan",
    "tests/workflow/test_compare.py",
    "tests/workflow/test_content_decides.py",
    "tests/workflow/test_damaged_state.py::test_damaged_files",
    "tests/workflow/test_doctor.py",
    "tests/workflow/test_every_key_plain.py::test_a_key_makes_what_it_shapes_stale",
    "tests/workflow/test_every_key_scripted.py::test_a_key_makes_what_it_shapes_stale",
    "tests/workflow/test_explain.py",
    "tests/workflow/test_guides.py::test_a_guide_does_what_it_says[guides/captions.md]",
    "tests/workflow/test_guides.py::test_a_session",
    "tests/workflow/test_guides.py::test_an_output",
    "tests/workflow/test_guides.py::test_each_guide",
    "tests/workflow/test_import.py::test_a_mistake_in_a_dataset_file",
    "tests/workflow/test_kill.py::test_a_killed_job_loses",
    "tests/workflow/test_kill.py::test_what_a_killed_writer_left_behind",
    "tests/workflow/test_latentmake.py",
    "tests/workflow/test_names.py::test_a_run_never_encodes",
    "tests/workflow/test_names.py::test_one_cache_file_asked_for_by_name",
    "tests/workflow/test_net.py::test_targets_print_and_write_what_is_pinned[images]",
    "tests/workflow/test_net.py::test_words_and_plans_of_edits_are_as_pinned[images",
    "tests/workflow/test_one_package.py",
    "tests/workflow/test_one_process.py",
    "tests/workflow/test_plan.py",
    "tests/workflow/test_prune.py",
    "tests/workflow/test_reuse.py::test_an_item_that_returns",
    "tests/workflow/test_rules.py",
    "tests/workflow/test_sdscripts.py::test_each_edit",
    "tests/workflow/test_sdscripts.py::test_every_image_has_latents",
    "tests/workflow/test_sdscripts.py::test_training_goes_on",
    "tests/workflow/test_shared_cache.py",
    "tests/workflow/test_training.py::test_a_failed_training",
    "tests/workflow/test_training.py::test_nothing_but_an_edit",
    "tests/workflow/test_vanished.py::test_caches_of_items_that_vanish_in_bulk_are_kept_apart_and_linked_back[plain-link",
    "tests/workflow/test_verify.py",
    "tests/workflow/test_wan.py::test_a_video_is_cut",
    "tests/workflow/test_wan.py::test_each_edit",
    "tests/workflow/test_wan_trainer.py",
)
"""Beginnings of the names of slow tests that stay all the same."""


def is_slow(name: str) -> bool:
    """Whether a test of that name (`tests/unit/test_docs.py::test_...`) is slow."""
    return name.startswith(SLOW) and not name.startswith(QUICK)
