"""What may come next, from what was read and written before: an index of each conversation's tokens, kept between its
turns, and drafts that follow the longest matches in it. It knows tokens and whose they are, no text, model or array.

    texts = DraftTexts(max_bytes)                                  # texts.py; one per model, any thread
    owner = TextOwner(str(principal), session, partition)          # kept_text.py
    drafter = texts.begin(owner, prompt, prediction, keep=True)    # on a web thread, before the row is submitted
    drafter.follow(...), .propose(...), .judge(...)                # on the engine thread
    texts.end(drafter)                                             # on a web thread, once the answer is over
    texts.forget(scope), texts.clear(), texts.num_bytes

`begin` and `end` keep words: whoever calls them does so within the turn's `keeping`, and passes what it says as `keep`,
False also where a request wants nothing kept: that one drafts from its own prompt and prediction alone. `follow` gets
every token of the answer, the pending one too, before `propose` is asked for what comes behind it.
"""
