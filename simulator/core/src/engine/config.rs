//! The engine's settings, and why some of them could serve nothing.

use super::cost::CostConfig;
use crate::tiers::config::TierConfig;

#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct EngineConfig {
    /// Blocks as the engine counts them; `null_blocks` of them hold no request's tokens.
    pub gpu_blocks: u32,
    pub null_blocks: u32,
    pub block_tokens: u64,
    pub chunk_tokens: u64,
    pub max_num_batched_tokens: u64,
    pub max_num_seqs: u64,
    pub max_model_len: u64,
    pub record_token_times: bool,
    pub macro_steps: bool,
    /// How many more schedules, at least, pass until the engine's connector has the answer to a look-up.
    pub lookup_polls: u64,
    /// How many more of an idle engine's schedules, which come sooner than the server answers.
    pub wake_polls: u64,
    /// How many more schedules pass until it knows that a load has ended which it did not wait for.
    pub load_polls: u64,
    /// A step prefills or decodes. It keeps the cached prefixes of all requests that begin in it before it takes room,
    /// which it does for all of them at once; steps are of whole blocks. What a request loads comes layer by layer
    /// while its step runs, which takes as long as the longer of the two. The GPU's cache evicts what one insertion
    /// added as a whole, and keeps no block twice. A prompt's blocks are inserted when the step that computes them
    /// ends, a reply's when its request does.
    pub prefills_first: bool,
    /// A hit of fewer tokens in the tiers, beyond the GPU's, is not loaded (with `prefills_first`).
    pub min_load_tokens: u64,
    /// The tiers begin to read from lower levels for a request when it arrives, and not when its turn comes.
    pub reads_ahead: bool,
    /// The tiers get the chunks that a request fills while it decodes, too; with `prefills_first`, when it ends.
    pub stores_replies: bool,
    /// The front end parses a request as a whole before it reads the next one.
    pub parses_whole: bool,
    /// Keep notes of evictions, preemptions and what the tiers did.
    pub journal: bool,
    pub cost: CostConfig,
    /// None: the engine has no tiers below the GPU.
    pub tiers: Option<TierConfig>,
}

impl EngineConfig {
    /// Requests read ahead of their turn only where what is read stays in the first level.
    pub fn settled(self) -> Self {
        let stays = self.tiers.as_ref().is_some_and(|tiers| tiers.policy.reads_ahead());
        let blocks = (self.max_num_batched_tokens / self.block_tokens).max(1);
        let whole = blocks.saturating_mul(self.block_tokens);
        Self {
            reads_ahead: self.reads_ahead && stays,
            max_num_batched_tokens: if self.prefills_first { whole } else { self.max_num_batched_tokens },
            ..self
        }
    }

    /// A cache server answers the engine's questions, and takes longer for more chunks; otherwise the front end does.
    pub fn asks_server(&self) -> bool {
        self.lookup_polls > 0 && !self.reads_ahead
    }

    /// Why an engine with these settings could serve nothing, in one line; None: it can.
    pub fn refusal(&self) -> Option<String> {
        let needed = [
            ("block_tokens", self.block_tokens),
            ("chunk_tokens", self.chunk_tokens),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("max_num_seqs", self.max_num_seqs),
        ];
        if let Some((name, _)) = needed.iter().find(|(_, value)| *value == 0) {
            return Some(format!("{name} must be at least 1, not 0"));
        }
        if self.max_model_len > u64::from(u32::MAX) {
            return Some(format!("max_model_len {} is more than {}", self.max_model_len, u32::MAX));
        }
        if self.gpu_blocks <= self.null_blocks {
            let (blocks, least) = (self.gpu_blocks, self.null_blocks);
            return Some(format!("gpu_blocks must be more than {least}, not {blocks}"));
        }
        self.tiers.as_ref().and_then(|tiers| tiers.refusal(self.block_tokens))
    }
}
