"""Deliberate faults of images in prompts."""

from mutate.fault import Fault

EQUALITY = "tests/integration/test_image_equality.py"
REFUSALS = "tests/integration/test_image_refusals.py"
SPANS = "tests/property/test_image_spans.py"
DEVICE = "tests/integration/test_model_device_forward.py"
FILES = "tests/unit/server/test_server_image_files.py"
EVENTS = "tests/unit/exporters/test_exporters_kv_events.py"

IMAGES = (
    Fault(
        name="image-that-no-hash-knows",
        stands_for="Two prompts with other images of the same size share blocks: one user is told of another's image.",
        file="engine/kvwatch_engine/core.py",
        old="return HashChain(self._root_of(source), self.settings.block_size, images)",
        new="return HashChain(self._root_of(source), self.settings.block_size, images[:0])",
        tests=(f"{EQUALITY}::test_another_image_of_the_same_size_shares_the_text_before_it_and_nothing_from_it_on",),
    ),
    Fault(
        name="chunk-that-begins-an-image-anew",
        stands_for="A chunk that begins within an image is given the image's first features.",
        file="engine/kvwatch_engine/scheduling/step_builder.py",
        old="spans.append(ImageSpan(begin, begin + end - start, start - image.position, image.image))",
        new="spans.append(ImageSpan(begin, begin + end - start, 0, image.image))",
        tests=(SPANS,),
    ),
    Fault(
        name="image-token-from-a-graph",
        stands_for="A chunk of one image token is replayed as a decode step, which embeds the placeholder.",
        file="engine/kvwatch_engine/model/graphs.py",
        old="is_captured = step.num_tokens == num_seqs and adapters is None and images is None",
        new="is_captured = step.num_tokens == num_seqs and adapters is None",
        tests=(f"{DEVICE}::test_a_step_of_one_image_token_is_not_taken_for_a_captured_decode_step",),
    ),
    Fault(
        name="placeholder-as-an-answer",
        stands_for="The model answers with a placeholder, behind which there is no image.",
        file="engine/kvwatch_engine/model/runner.py",
        old="logits[:, self._model.images.input.placeholder_id] = NEVER",
        new="pass",
        tests=(f"{EQUALITY}::test_a_placeholder_is_never_generated_however_much_it_is_wanted",),
    ),
    Fault(
        name="features-without-end",
        stands_for="Features of every image ever seen are kept.",
        file="engine/kvwatch_engine/model/image_encoder.py",
        old="while self._cached_bytes > self.max_cache_bytes:",
        new="while self._cached_bytes > self.max_cache_bytes + (1 << 40):",
        tests=(f"{EQUALITY}::test_kept_features_have_a_bound_and_the_latest_ones_stay",),
    ),
    Fault(
        name="pixels-before-their-number",
        stands_for="An image is decoded whatever size its header claims: a few bytes become gigabytes.",
        file="engine/kvwatch_engine/server/image_files.py",
        old="    if width * height > max_pixels:\n",
        new="    if width * height > 100 * max_pixels:\n",
        tests=(f"{REFUSALS}::test_an_image_that_cannot_be_taken_is_refused_with_its_place_and_the_remedy",),
    ),
    Fault(
        name="scans-without-end",
        stands_for="A progressive JPEG of a million scans keeps a thread busy for hours.",
        file="engine/kvwatch_engine/server/image_files.py",
        old="    if num_scans > MAX_JPEG_SCANS:\n",
        new="    if num_scans > 100 * MAX_JPEG_SCANS:\n",
        tests=(FILES,),
    ),
    Fault(
        name="image-without-a-mark",
        stands_for="Routers are told placeholder tokens alone and send every image to the blocks of any.",
        file="kvwatch/exporters/kv_events/translator.py",
        old="        return (*texts, *images)\n",
        new="        return (*texts, *list(images)[:0])\n",
        tests=(EVENTS,),
    ),
)
