//! Plans how much memory a model needs, to the byte, without a GPU and without its weights.

use trainer::{Failure, Plan, Settings, Target, configuration};

fn main() -> Result<(), Failure> {
    for spec in ["none", "core_attn,layernorm,mlp_act", "full"] {
        let spec = format!("recompute.spec={spec}");
        let set = [&spec, "train.dtype=bf16", "data.seq=8192", "batch.micro=1"];
        let settings = Settings::new(&configuration("llama-3-8b", &set)?)?;
        let plan = Plan::new(&settings, Target::Cuda)?;
        println!("{spec}: {} bytes", plan.peak_bytes);
        println!("  fits: {:?}", plan.fits);
    }
    Ok(())
}

#[test]
fn it_runs() {
    main().unwrap();
}
