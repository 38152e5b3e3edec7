//! Claims that are passed to other processes as text.

use std::time::Duration;

use leasehold_claim::{ClaimError, ClaimRef, Claimed, IdType, Outcome, Renewal, RowId, Settled};

use super::Env;
use super::bench::{Bench, Layout, bounded, is_superseded, row};

/// Settles the claim in `text` through another client.
async fn acknowledge(bench: &Bench, text: &str) -> Result<Settled, ClaimError> {
    let claim: ClaimRef = text.parse().unwrap();
    bounded(bench.client().settle_one(&claim, Outcome::Done)).await
}

fn receipt(claimed: &Claimed) -> String {
    claimed.claim.to_string()
}

pub async fn a_claim_is_settled_by_its_text(env: &Env) {
    let layout = Layout::new(|spec| spec.group("entity").grouped()).queued();
    for layout in [Layout::new(|spec| spec), layout.clone(), layout.numbered_owners()] {
        let is_queued = layout.queued;
        let bench = env.table(layout).await;
        let mut keys = Vec::new();
        for id in [1, 2] {
            let seed = row(id).entity("a");
            keys.push(bench.insert(if is_queued { seed.queue("q ~._'é") } else { seed }).await);
        }
        for claimed in bench.take(2).await {
            let text = receipt(&claimed);
            let renewed = bench.client();
            let claim: ClaimRef = text.parse().unwrap();
            assert_eq!(claim, claimed.claim);
            let renewals = bounded(renewed.renew(&[claim], Duration::from_secs(60))).await.unwrap();
            assert_eq!(renewals, [Renewal::Renewed]);
            acknowledge(&bench, &text).await.unwrap();
            assert!(is_superseded(&acknowledge(&bench, &text).await), "it has ended");
        }
        for key in &keys {
            assert!(bench.is_done(key).await);
        }
    }
}

pub async fn a_stale_text_is_refused(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let first = bench.take_one().await;
    bench.crash(&first.claim).await;
    assert!(is_superseded(&acknowledge(&bench, &receipt(&first)).await), "nobody has it");
    let second = bench.take_one().await;
    assert!(is_superseded(&acknowledge(&bench, &receipt(&first)).await), "somebody else has it");
    assert!(bench.is_taken(&key).await);
    acknowledge(&bench, &receipt(&second)).await.unwrap();
    assert!(bench.is_done(&key).await);
}

pub async fn texts_of_ids_of_every_type(env: &Env) {
    let of = |kind, texts: [&str; 2]| (kind, texts.map(|text| RowId::parse(kind, text).unwrap()));
    for (kind, ids) in [
        of(IdType::Int, ["-9223372036854775808", "7"]),
        of(IdType::Uuid, ["b7f0b0a0-0000-4000-8000-000000000002", "a7f0b0a0-0000-4000-8000-000000000001"]),
        of(IdType::Text, ["a'b\"c\\d,{}\n", ""]),
    ] {
        let bench = env.table(Layout::new(|spec| spec).id(kind)).await;
        for id in ids {
            bench.insert(row(id)).await;
        }
        for claimed in bench.take(5).await {
            acknowledge(&bench, &receipt(&claimed)).await.unwrap();
            assert!(bench.is_done(&claimed.rows[0].key).await);
        }
    }
}

/// A text of another table does not affect the claims that are settled or renewed in the same call.
pub async fn texts_of_other_tables_are_refused(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claim = bench.take_one().await.claim;
    let own = claim.to_string();
    let (owner, id) = own.rsplit_once('.').unwrap();
    let others = [
        format!("{owner}.1~tx"),
        format!("{owner}.1~t1"),
        format!("{owner}.1~u{}", "0".repeat(32)),
        format!("{owner}.1~i1~queue"),
        format!("lc1.i7.{id}"),
    ];
    let mut claims: Vec<ClaimRef> = others.iter().map(|text| text.parse().unwrap()).collect();
    for other in &claims {
        assert!(is_superseded(&bench.settle(other, Outcome::Done).await), "{other}");
    }
    claims.push(claim);
    let renewals = bounded(bench.client().renew(&claims, Duration::from_secs(60))).await.unwrap();
    assert!(renewals[..5].iter().all(|renewal| matches!(renewal, Renewal::Lost { .. })), "{renewals:?}");
    assert_eq!(renewals[5], Renewal::Renewed);
    let settlements = claims.into_iter().map(|claim| (claim, Outcome::Done)).collect();
    let answers = bench.settle_all(settlements).await;
    assert!(answers[..5].iter().all(is_superseded), "{answers:?}");
    assert!(answers[5].is_ok() && bench.is_done(&key).await, "{answers:?}");
}
