//! The start-up self-test: what is right passes in every variant, what is wrong is refused.

use std::sync::Mutex;

use riparian::device::DeviceError;
use riparian::device::kernels::Team;
use riparian::device::wgpu::selftest::{Kinds, Report, Wanted, run};
use riparian::device::wgpu::{Context, find};
use riparian::knobs::{Activations, DeviceChoice, DispatchClass};

/// One at a time: the driver's threads are all there is.
static ONE: Mutex<()> = Mutex::new(());

fn adapter(team: Option<Team>) -> Context {
    let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    find(&DeviceChoice::Adapter(name)).expect("an adapter for the tests").open(team, true).expect("a device")
}

fn tested(context: &mut Context, wanted: Wanted<'_>) -> Result<Report, DeviceError> {
    run(context, &Kinds::usual(), &wanted)
}

/// The adapter that was asked for, with what the tests count on it for: 8 lanes on lavapipe, 4 on SwiftShader, which binds ten
/// storage buffers a stage.
#[test]
fn the_adapter_is_the_one_that_was_named() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let name = std::env::var("RIPARIAN_TEST_ADAPTER").unwrap_or_else(|_| "llvmpipe".into());
    let context = adapter(None);
    assert!(context.info.name.to_lowercase().contains(&name.to_lowercase()), "{:?}", context.info);
    let lanes = [context.info.subgroup_min_size, context.info.subgroup_max_size];
    match name.as_str() {
        "llvmpipe" => assert_eq!((lanes, context.team), ([8, 8], Team::Subgroup)),
        "SwiftShader" => {
            assert_eq!((lanes, context.team), ([4, 4], Team::Subgroup));
            assert_eq!(context.limits.max_storage_buffers_per_shader_stage, 10);
            assert_eq!(context.limits.max_compute_invocations_per_workgroup, 256);
        }
        _ => {}
    }
}

#[test]
fn what_is_right_passes() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for (team, activations, full, bank_rep) in [
        (None, Activations::Int8, true, 1),
        (None, Activations::F32, false, 1),
        (Some(Team::None), Activations::F32, true, 8),
        (Some(Team::None), Activations::Int8, false, 2),
    ] {
        let mut context = adapter(team);
        context.bank_rep = bank_rep;
        let report = tested(&mut context, Wanted { activations, full, skip: &[] });
        let report = report.unwrap_or_else(|why| panic!("{team:?} {activations:?} {full} {bank_rep}: {why}"));
        assert!(report.pipelines > 20, "{report:?}");
    }
}

#[test]
fn a_team_of_another_size_is_refused() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let mut context = adapter(None);
    if context.team == Team::Subgroup32 {
        return;
    }
    context.team = Team::Subgroup32;
    let refused = tested(&mut context, Wanted { activations: Activations::Int8, full: true, skip: &[] });
    let why = refused.expect_err("32 lanes where there are others").to_string();
    assert!(why.contains("subgroups of 32") && why.contains("32 lanes"), "{why}");
}

#[test]
fn a_wrong_kernel_is_refused() {
    let _one = ONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    for class in [DispatchClass::Scan, DispatchClass::ExpDown, DispatchClass::Attn, DispatchClass::ShDown] {
        let refused = tested(&mut adapter(None), Wanted { activations: Activations::Int8, full: true, skip: &[class] });
        let why = refused.expect_err("a class is left out").to_string();
        assert!(why.contains("self-test: a "), "{class:?}: {why}");
    }
}
