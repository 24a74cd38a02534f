//! Prompts sent together to an engine of their own: what the points of a calibration are held against.

use crate::engine::Engine;
use crate::engine::config::EngineConfig;
use crate::engine::request::{Completion, Submission};
use crate::time::{FOREVER, Ticks, from_s, to_s};

/// What an engine is asked. first: prompts that come one after another. emptied: tiers that forget what those have
/// left. together: prompts that are sent at one moment after that.
pub struct Probe {
    pub first: Vec<Submission>,
    pub emptied: Vec<String>,
    pub together: Vec<Submission>,
}

/// When the prompts that are sent together were sent, and when all had ended. tokens: the first and the last one of each.
pub struct Probed {
    pub sent: Ticks,
    pub ended: Ticks,
    pub tokens: Vec<(Ticks, Ticks)>,
}

/// Asks a fresh engine. Error: it could serve nothing, or not one of the requests.
pub fn probe(config: EngineConfig, probe: &Probe) -> Result<Probed, String> {
    let mut engine = Engine::new(config)?;
    for one in &probe.first {
        send(&mut engine, std::slice::from_ref(one))?;
    }
    while !engine.idle() {
        engine.advance(FOREVER)?;
    }
    let emptied: Vec<&str> = probe.emptied.iter().map(String::as_str).collect();
    engine.reset(&emptied)?;
    let sent = engine.now();
    let tokens = send(&mut engine, &probe.together)?;
    Ok(Probed { sent, ended: engine.now(), tokens })
}

/// Sends these at the next moment that is an f64 of seconds, as from any caller, and runs until all have ended; the
/// first and the last token of each.
fn send(engine: &mut Engine, requests: &[Submission]) -> Result<Vec<(Ticks, Ticks)>, String> {
    let at = from_s(to_s(engine.now())).max(engine.now());
    for one in requests {
        engine.submit(one.clone(), at)?;
    }
    let mut tokens = Vec::new();
    while tokens.len() < requests.len() {
        let done = engine.advance(FOREVER)?;
        if done.is_empty() {
            return Err(format!(
                "{} of {} requests never end",
                requests.len() - tokens.len(),
                requests.len()
            ));
        }
        for one in done {
            tokens.push(one.first_token.zip(one.last_token).ok_or_else(|| unserved(one))?);
        }
    }
    Ok(tokens)
}

fn unserved(one: Completion) -> String {
    one.error.unwrap_or_else(|| format!("request {} ended without a token", one.id))
}
