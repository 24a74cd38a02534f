//! A request: as a caller submits it, as the engine keeps it, and its completion.

use std::ops::{Deref, Range};
use std::sync::Arc;

use super::blocks::Held;
use crate::keys::{BlockRun, ChunkRange, Segment};
use crate::tiers::config::MOST_LEVELS;
use crate::tiers::{Hit, ReadAhead};
use crate::time::Ticks;

/// A prompt's segments. Prompts that are submitted together share one row of segments.
#[derive(Clone, Debug)]
pub struct Prompt {
    row: Arc<[Segment]>,
    range: Range<usize>,
}

impl Prompt {
    /// None: the row does not have this range.
    pub fn new(row: &Arc<[Segment]>, range: Range<usize>) -> Option<Self> {
        row.get(range.clone()).map(|_| Self { row: row.clone(), range })
    }
}

impl From<Vec<Segment>> for Prompt {
    fn from(segments: Vec<Segment>) -> Self {
        Self { range: 0..segments.len(), row: segments.into() }
    }
}

impl Deref for Prompt {
    type Target = [Segment];
    fn deref(&self) -> &[Segment] {
        &self.row[self.range.clone()]
    }
}

/// A request as a caller submits it. `reply_id` names the stream of the tokens that the engine will generate.
#[derive(Clone, Debug)]
pub struct Submission {
    pub id: String,
    pub prompt: Prompt,
    pub output_tokens: u64,
    pub reply_id: i64,
}

impl Submission {
    /// None: more tokens than fit 64 bits.
    pub fn prompt_tokens(&self) -> Option<u64> {
        self.prompt.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.tokens))
    }
}

/// Prompt tokens by where their KV came from, as decided at the first admission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    pub computed: u64,
    pub gpu: u64,
    /// By level below the GPU.
    pub levels: [u64; MOST_LEVELS],
}

#[cfg(test)]
impl Sources {
    pub fn sum(&self) -> u64 {
        self.computed + self.gpu + self.levels.iter().sum::<u64>()
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub id: String,
    pub first_token: Option<Ticks>,
    pub last_token: Option<Ticks>,
    pub tokens: Vec<Ticks>,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub sources: Sources,
    pub preemptions: u64,
    pub error: Option<String>,
}

impl Completion {
    pub fn failed(id: String, prompt_tokens: u64, error: String) -> Self {
        Self {
            id,
            first_token: None,
            last_token: None,
            tokens: Vec::new(),
            prompt_tokens,
            output_tokens: 0,
            sources: Sources::default(),
            preemptions: 0,
            error: Some(error),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub enum Lookup {
    #[default]
    NotAsked,
    Pending,
    /// The server has an answer, and gives it once it has taken the question.
    Untold(Hit),
    /// The scheduler has asked what lower levels hold; a later pass takes the answer.
    Asked(Asked, Matched),
    /// The tiers read ahead for the request, which has yet to ask.
    Ahead(Matched),
    /// They have, and this is what they brought.
    Read(ReadAhead, Matched),
    Answered(Hit),
}

/// When a scheduler asked for the tokens of a prompt that the GPU and the first level lack, and how many leading chunks
/// of the prompt the levels then held.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub at: Ticks,
    pub found: usize,
    pub lacking: u64,
}

/// What the GPU or the first level held of a prompt when the tiers were last asked to read ahead, and how often they
/// were.
#[derive(Clone, Copy, Debug)]
pub struct Matched {
    pub tokens: u64,
    pub times: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Status {
    #[default]
    Waiting,
    /// The request holds its blocks while the tiers fill them.
    Loading,
    /// The tiers have filled them.
    Loaded,
    Running,
    /// The request has all tokens; it holds its blocks until its stores have ended.
    Finished,
}

#[derive(Clone, Debug, Default)]
pub struct Request {
    pub id: String,
    /// The reply's hash id, which names the request after its completion.
    pub owner: i64,
    pub prompt: u64,
    pub output: u64,
    /// All whole blocks that prompt and output will fill.
    pub runs: Vec<BlockRun>,
    /// The prompt's whole chunks. Where the tiers keep replies, the reply's follow them.
    pub chunks: ChunkRange,
    pub status: Status,
    pub blocks: Held,
    /// Tokens with KV on the GPU; after scheduling, the step in flight counts too.
    pub computed: u64,
    pub generated: u64,
    pub preemptions: u64,
    pub lookup: Lookup,
    /// What was read ahead, once the first level has answered.
    pub was_ahead: Option<(ReadAhead, Matched)>,
    /// How many more schedules pass before the engine sees the look-up's answer.
    pub polls_left: u64,
    /// How many schedules of an idle engine pass before those count.
    pub wake_polls_left: u64,
    /// Storage was read for it, and no schedule has come since.
    pub reading: bool,
    /// When the server's answer comes; None: it has others to answer before it gets to that.
    pub told_at: Option<Ticks>,
    pub stored_chunks: u64,
    /// Tokens that a lower level than the first one held: they came as one piece.
    pub fetched: Range<u64>,
    pub stores_in_flight: u64,
    /// Tokens at the front end: the first, the last, or both.
    pub answers: u64,
    pub sources: Sources,
    pub first_token: Option<Ticks>,
    pub last_token: Option<Ticks>,
    pub tokens: Vec<Ticks>,
}

impl Request {
    /// Tokens known so far: prompt and generated ones.
    pub fn tokens_known(&self) -> u64 {
        self.prompt + self.generated
    }

    /// True once only generated tokens are left to compute.
    pub fn decoding(&self) -> bool {
        self.generated > 0 && self.computed + 1 == self.tokens_known()
    }

    /// True if `tokens` more tokens neither need a new block nor fill one.
    #[inline(always)]
    pub fn stays_in_block(&self, tokens: u64, block_tokens: u64) -> bool {
        let (end, blocks) = (self.computed + tokens, &self.blocks);
        end <= blocks.len().saturating_mul(block_tokens)
            && end < (blocks.findable.blocks + 1).saturating_mul(block_tokens)
    }

    /// True while chunks of the prompt are neither stored nor loaded.
    pub fn lacks_stores(&self) -> bool {
        self.stored_chunks < self.chunks.len() as u64
    }

    /// True once the request has finished and no store reads from its blocks.
    pub fn retires(&self) -> bool {
        self.status == Status::Finished && self.stores_in_flight == 0
    }

    /// The completion. The request keeps its blocks, and what its stores need.
    pub fn finish(&mut self) -> Completion {
        self.runs.clear();
        (self.chunks, self.lookup) = (ChunkRange::default(), Lookup::NotAsked);
        Completion {
            id: std::mem::take(&mut self.id),
            first_token: self.first_token,
            last_token: self.last_token,
            tokens: std::mem::take(&mut self.tokens),
            prompt_tokens: self.prompt,
            output_tokens: self.generated,
            sources: self.sources,
            preemptions: self.preemptions,
            error: None,
        }
    }
}
